/* Where the memory of a tensor lies, in a few nanoseconds: of torch's by the DLPack exchange table of its type, of
 * NumPy's arrays by the public fields of the object.
 *
 * The structs are those of dlpack.h 1.x (DLTensor, DLPackExchangeAPI), to whose table later minor versions only add, and
 * those that are part of NumPy's ABI since 1.0 (PyArrayObject_fields, and the fields of PyArray_Descr that NumPy 1 and 2
 * share). NumPy's headers would have to be found at build time, by a program in place of a table of extensions.
 */
#ifndef BPS_TENSOR_MEMORY_H
#define BPS_TENSOR_MEMORY_H

#include <Python.h>
#include <stdint.h>
#include <stddef.h>

#define BPS_DL_CPU 1
#define BPS_DL_NAME "dlpack_exchange_api" /* of the capsule */

struct bps_dl_tensor {
    void *data;
    int32_t device_type, device_id, ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct bps_dl_exchange {
    uint32_t major, minor;
    const struct bps_dl_exchange *previous;
    void *allocate, *from_object, *to_object;
    int (*view)(void *object, struct bps_dl_tensor *out); /* 0, or -1 and an exception is set */
};

/* Whether a tensor on the CPU has such a dtype and shape, and its elements follow each other in C order. */
static inline int bps_dl_is(const struct bps_dl_tensor *tensor, uint8_t code, uint8_t bits, const int64_t *shape,
                            int ndim)
{
    int64_t stride = 1;
    if (tensor->device_type != BPS_DL_CPU || tensor->data == NULL || tensor->code != code || tensor->bits != bits
        || tensor->lanes != 1 || tensor->ndim != ndim)
        return 0;
    for (int i = ndim - 1; i >= 0; i--) {
        if (tensor->shape[i] != shape[i])
            return 0;
        if (tensor->strides != NULL && shape[i] != 1 && tensor->strides[i] != stride)
            return 0;
        stride *= shape[i];
    }
    return 1;
}

enum { BPS_ARRAY_C_CONTIGUOUS = 0x1, BPS_ARRAY_WRITEABLE = 0x400 };

struct bps_array_dtype {
    PyObject_HEAD
    PyTypeObject *scalar;
    char kind, type, byteorder;
};

struct bps_array {
    PyObject_HEAD
    char *data;
    int ndim;
    intptr_t *shape, *strides;
    PyObject *base;
    struct bps_array_dtype *dtype;
    int flags;
};

/* Whether an array has such a dtype, shape, and all of `flags`. */
static inline int bps_array_is(const struct bps_array *array, const struct bps_array_dtype *dtype, const int64_t *shape,
                               int ndim, int flags)
{
    if (array->dtype != dtype
        && (array->dtype->scalar != dtype->scalar || array->dtype->byteorder != dtype->byteorder))
        return 0;
    if (array->ndim != ndim || (array->flags & flags) != flags)
        return 0;
    for (int i = 0; i < ndim; i++)
        if (array->shape[i] != shape[i])
            return 0;
    return 1;
}

#endif
