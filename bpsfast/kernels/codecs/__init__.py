"""Kernels that compress and decompress partitions, as numba cfuncs of LLVM IR; the node processes call them.

    codec_kernels     their C signatures and addresses; imports no numba
    compilation       compiles them
    codec_reference   formats and arithmetic in NumPy: the description of the formats, and the oracle of the tests
    onebit, sparse_pairs (topk, randomk), dithering, low_precision (float16, bfloat16, int8)    the formats
    error_feedback    momentum, error feedback, average and rounding around them
    intrinsics, elements, reductions    what all of them use
"""
