/* Seal: one direction of an encrypted connection: AES-256-GCM, record by record.
 *
 *   record   ciphertext, as long as the plaintext | tag 16
 *   nonce    4 bytes 0 | number of the record, little endian; each connection and direction has a key of its own
 *
 * The number is not sent: a record that is missing, repeated or moved cannot be decrypted. Both sides know the length
 * of a record: a header, then the payload that it announces, in records of BPS_SEAL_RECORD bytes and a shorter last
 * one.
 *
 * A payload is decrypted straight into its slot and checked then. If the check fails, the slot may hold garbage, but
 * the write is not reported as arrived, and comes again over another connection. A seal that has failed once cannot be
 * used any more.
 */
#pragma once

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "crypto.h"

#define BPS_SEAL_TAG 16u
#define BPS_SEAL_KEY 32u
#define BPS_SEAL_RECORD 65536u /* what is sealed at once: it stays in the cache until it is sent */
#define BPS_SEAL_ROOM (BPS_SEAL_RECORD + 64u + 2u * BPS_SEAL_TAG)

struct bps_seal {
    const struct bps_crypto *crypto;
    void *context;
    uint64_t n_records;
    int is_broken;
    unsigned char staging[BPS_SEAL_ROOM]; /* a header's record, and one of a payload */
};

/* A seal with a key, for one direction; NULL without memory, or if the library refuses. */
static inline struct bps_seal *bps_seal_make(const struct bps_crypto *crypto, const unsigned char *key, int seals)
{
    struct bps_seal *seal = (struct bps_seal *)calloc(1, sizeof *seal);
    if (seal == NULL)
        return NULL;
    seal->crypto = crypto;
    seal->context = crypto->EVP_CIPHER_CTX_new();
    int is_ready = seal->context != NULL &&
                   (seals ? crypto->EVP_EncryptInit_ex : crypto->EVP_DecryptInit_ex)(
                       seal->context, crypto->EVP_aes_256_gcm(), NULL, key, NULL) == 1;
    if (is_ready)
        return seal;
    if (seal->context != NULL)
        crypto->EVP_CIPHER_CTX_free(seal->context);
    free(seal);
    return NULL;
}

static inline void bps_seal_free(struct bps_seal *seal)
{
    if (seal == NULL)
        return;
    seal->crypto->EVP_CIPHER_CTX_free(seal->context); /* wipes the key */
    free(seal);
}

static inline void bps_seal_nonce(struct bps_seal *seal, unsigned char nonce[12])
{
    memset(nonce, 0, 4);
    memcpy(nonce + 4, &seal->n_records, 8);
    seal->n_records++;
}

/* Write the next record, of nbytes of plain text, to `record`, which has room for the tag too; 0, or EIO. */
static inline int bps_seal_close(struct bps_seal *seal, const void *plain, size_t nbytes, void *record)
{
    const struct bps_crypto *crypto = seal->crypto;
    unsigned char nonce[12], *out = (unsigned char *)record;
    int n = 0, rest = 0;
    bps_seal_nonce(seal, nonce);
    int is_done = !seal->is_broken &&
                  crypto->EVP_EncryptInit_ex(seal->context, NULL, NULL, NULL, nonce) == 1 &&
                  crypto->EVP_EncryptUpdate(seal->context, out, &n, (const unsigned char *)plain, (int)nbytes) == 1 &&
                  crypto->EVP_EncryptFinal_ex(seal->context, out + n, &rest) == 1 && (size_t)(n + rest) == nbytes &&
                  crypto->EVP_CIPHER_CTX_ctrl(seal->context, BPS_GET_TAG, BPS_SEAL_TAG, out + nbytes) == 1;
    seal->is_broken = !is_done;
    return is_done ? 0 : EIO;
}

/* Open the next record, whose plain text has nbytes, into `plain`; 0, or EBADMSG if it is not what the peer has
 * sealed. */
static inline int bps_seal_open(struct bps_seal *seal, const void *record, size_t nbytes, void *plain)
{
    const struct bps_crypto *crypto = seal->crypto;
    unsigned char nonce[12], *out = (unsigned char *)plain;
    const unsigned char *in = (const unsigned char *)record;
    int n = 0, rest = 0;
    bps_seal_nonce(seal, nonce);
    int is_done = !seal->is_broken &&
                  crypto->EVP_DecryptInit_ex(seal->context, NULL, NULL, NULL, nonce) == 1 &&
                  crypto->EVP_DecryptUpdate(seal->context, out, &n, in, (int)nbytes) == 1 &&
                  crypto->EVP_CIPHER_CTX_ctrl(seal->context, BPS_SET_TAG, BPS_SEAL_TAG, (void *)(in + nbytes)) == 1 &&
                  crypto->EVP_DecryptFinal_ex(seal->context, out + n, &rest) == 1 && (size_t)(n + rest) == nbytes;
    seal->is_broken = !is_done;
    return is_done ? 0 : EBADMSG;
}

/* How many bytes a write of a payload of nbytes is on the wire. */
static inline uint64_t bps_seal_wire_nbytes(uint64_t header_nbytes, uint64_t nbytes)
{
    return header_nbytes + nbytes + BPS_SEAL_TAG * (1 + (nbytes + BPS_SEAL_RECORD - 1) / BPS_SEAL_RECORD);
}
