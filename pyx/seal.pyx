# cython: language_level=3, binding=True
"""The encryption of one direction of a connection (`seal.h`): AES-256-GCM records by OpenSSL's libcrypto."""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t, uintptr_t


cdef extern from "seal.h" nogil:
    struct bps_crypto:
        pass
    struct bps_seal:
        uint64_t n_records
    enum: BPS_SEAL_TAG, BPS_SEAL_KEY, BPS_SEAL_RECORD
    const char *bps_crypto_load(bps_crypto *, const char *)
    bps_seal *bps_seal_make(const bps_crypto *, const unsigned char *, int)
    void bps_seal_free(bps_seal *)
    int bps_seal_close(bps_seal *, const void *, size_t, void *)
    int bps_seal_open(bps_seal *, const void *, size_t, void *)

TAG_NBYTES = BPS_SEAL_TAG
KEY_NBYTES = BPS_SEAL_KEY
RECORD_NBYTES = BPS_SEAL_RECORD

#: OpenSSL 3, and the one before it.
_LIBRARIES = (b"libcrypto.so.3", b"libcrypto.so.1.1")

cdef bps_crypto _crypto
cdef bint _is_loaded = False


def load():
    """Find libcrypto; at once if it was found before. Raises `OSError` that says what is missing of which library."""
    global _is_loaded
    cdef const char *missing
    found = []
    for name in () if _is_loaded else _LIBRARIES:
        missing = bps_crypto_load(&_crypto, name)
        if missing == NULL:
            _is_loaded = True
            return
        what = "not found" if missing == <const char *>name else missing.decode() + " not in it"
        found.append(f"{name.decode()}: {what}")
    if not _is_loaded:
        raise OSError("; ".join(found))


@cython.final
cdef class Seal:
    """One direction of one connection. Not thread-safe; a `Stream` that has it uses it alone.

    *key*: 32 bytes that nothing else was ever sealed with. *closes*: whether it closes records, else it opens them.

    Raises `OSError` without libcrypto.
    """

    cdef bps_seal *seal
    cdef bint closes

    def __cinit__(self, bytes key not None, *, bint closes):
        if len(key) != BPS_SEAL_KEY:
            raise ValueError(f"a seal's key has {BPS_SEAL_KEY} bytes, not {len(key)}")
        load()
        self.closes = closes
        self.seal = bps_seal_make(&_crypto, <const unsigned char *>PyBytes_AS_STRING(key), closes)
        if self.seal == NULL:
            raise MemoryError("a seal, or libcrypto refuses AES-256-GCM")

    def __dealloc__(self):
        bps_seal_free(self.seal)

    @property
    def address(self):
        """Where native code finds it, as long as it lives."""
        return <uintptr_t>self.seal

    def close(self, const unsigned char[::1] plain not None):
        """Return *plain* as the next record."""
        if not self.closes or plain.shape[0] > BPS_SEAL_RECORD:
            raise ValueError(f"{plain.shape[0]} bytes to be sealed; at most {BPS_SEAL_RECORD}, by a seal that closes")
        cdef bytes record = PyBytes_FromStringAndSize(NULL, plain.shape[0] + BPS_SEAL_TAG)
        cdef const void *source = &plain[0] if plain.shape[0] else NULL
        if bps_seal_close(self.seal, source, <size_t>plain.shape[0], PyBytes_AS_STRING(record)):
            raise OSError("libcrypto could not seal a record")
        return record

    def open(self, const unsigned char[::1] record not None):
        """Return what the peer has closed as the next record; raises `ValueError` if this is not it."""
        cdef Py_ssize_t nbytes = record.shape[0] - BPS_SEAL_TAG
        if self.closes or not 0 <= nbytes <= BPS_SEAL_RECORD:
            raise ValueError(f"a record of {record.shape[0]} bytes: it has {BPS_SEAL_TAG} to {BPS_SEAL_RECORD} more, "
                             "and is opened by a seal that opens")
        cdef bytes plain = PyBytes_FromStringAndSize(NULL, nbytes)
        if bps_seal_open(self.seal, &record[0], <size_t>nbytes, PyBytes_AS_STRING(plain)):
            raise ValueError("a record that the peer has not sealed, or not next")
        return plain
