/* Crypto: the functions of OpenSSL's libcrypto that encryption needs, loaded at run time, and only if it is used. */
#pragma once

#include <dlfcn.h>
#include <stddef.h>

/* EVP_CIPHER_CTX_ctrl's. */
enum { BPS_GET_TAG = 0x10, BPS_SET_TAG = 0x11 };

struct bps_crypto {
    void *(*EVP_CIPHER_CTX_new)(void);
    void (*EVP_CIPHER_CTX_free)(void *);
    int (*EVP_CIPHER_CTX_ctrl)(void *, int, int, void *);
    const void *(*EVP_aes_256_gcm)(void);
    int (*EVP_EncryptInit_ex)(void *, const void *, void *, const unsigned char *, const unsigned char *);
    int (*EVP_EncryptUpdate)(void *, unsigned char *, int *, const unsigned char *, int);
    int (*EVP_EncryptFinal_ex)(void *, unsigned char *, int *);
    int (*EVP_DecryptInit_ex)(void *, const void *, void *, const unsigned char *, const unsigned char *);
    int (*EVP_DecryptUpdate)(void *, unsigned char *, int *, const unsigned char *, int);
    int (*EVP_DecryptFinal_ex)(void *, unsigned char *, int *);
};

/* Fill the table from the library *name*; NULL, or what is missing. The library stays loaded. */
static inline const char *bps_crypto_load(struct bps_crypto *crypto, const char *name)
{
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return name;
#define BPS_FIND(symbol)                                             \
    *(void **)&crypto->symbol = dlsym(library, #symbol);             \
    if (crypto->symbol == NULL) {                                    \
        dlclose(library);                                            \
        return #symbol;                                              \
    }
    BPS_FIND(EVP_CIPHER_CTX_new)
    BPS_FIND(EVP_CIPHER_CTX_free)
    BPS_FIND(EVP_CIPHER_CTX_ctrl)
    BPS_FIND(EVP_aes_256_gcm)
    BPS_FIND(EVP_EncryptInit_ex)
    BPS_FIND(EVP_EncryptUpdate)
    BPS_FIND(EVP_EncryptFinal_ex)
    BPS_FIND(EVP_DecryptInit_ex)
    BPS_FIND(EVP_DecryptUpdate)
    BPS_FIND(EVP_DecryptFinal_ex)
#undef BPS_FIND
    return NULL;
}
