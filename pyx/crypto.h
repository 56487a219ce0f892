/* Crypto: the functions of OpenSSL's libcrypto that encryption needs, loaded at run time, and only if it is used. */
#pragma once

#include <dlfcn.h>
#include <stddef.h>

/* EVP_CIPHER_CTX_ctrl's. */
enum { BPS_GET_TAG = 0x10, BPS_SET_TAG = 0x11 };

/* X(result, name, parameters) */
#define BPS_CRYPTO_FUNCTIONS(X)                                                                               \
    X(void *, EVP_CIPHER_CTX_new, (void))                                                                     \
    X(void, EVP_CIPHER_CTX_free, (void *))                                                                    \
    X(int, EVP_CIPHER_CTX_ctrl, (void *, int, int, void *))                                                   \
    X(const void *, EVP_aes_256_gcm, (void))                                                                  \
    X(int, EVP_EncryptInit_ex, (void *, const void *, void *, const unsigned char *, const unsigned char *))  \
    X(int, EVP_EncryptUpdate, (void *, unsigned char *, int *, const unsigned char *, int))                   \
    X(int, EVP_EncryptFinal_ex, (void *, unsigned char *, int *))                                             \
    X(int, EVP_DecryptInit_ex, (void *, const void *, void *, const unsigned char *, const unsigned char *))  \
    X(int, EVP_DecryptUpdate, (void *, unsigned char *, int *, const unsigned char *, int))                   \
    X(int, EVP_DecryptFinal_ex, (void *, unsigned char *, int *))

#define BPS_CRYPTO_FIELD(result, name, parameters) result(*name) parameters;
struct bps_crypto {
    BPS_CRYPTO_FUNCTIONS(BPS_CRYPTO_FIELD)
};

/* Fill the table from the library `file`; NULL, or what is missing. The library stays loaded. */
static inline const char *bps_crypto_load(struct bps_crypto *crypto, const char *file)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        return file;
#define BPS_CRYPTO_FIND(result, name, parameters)    \
    *(void **)&crypto->name = dlsym(library, #name); \
    if (crypto->name == NULL) {                      \
        dlclose(library);                            \
        return #name;                                \
    }
    BPS_CRYPTO_FUNCTIONS(BPS_CRYPTO_FIND)
    return NULL;
}
