/* Direct sum: combines the inputs of the ranks of one machine, 64 bytes at a time, and stores the result to several
 * places at once.
 *
 * The arithmetic is that of the engine's kernels (`bpsfast/kernels`), to the bit: inputs are combined in the order of
 * the ranks in the accumulator's type, rounded once to the wire type, then divided, and rounded again; a NaN result is
 * the quiet NaN. All of it is written with the compiler's vectors of 64 bytes, which it splits for narrower processors,
 * and compiled for each level of x86-64 that pays; the processor is asked once. The caller's floating-point environment
 * does not count: `bps_float_enter`.
 */
#ifndef BPS_DIRECT_SUM_H
#define BPS_DIRECT_SUM_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi" /* vectors are passed to functions that are always inlined only */

#define BPS_SUM_LINE 64u
#define BPS_SUM_RANKS 64
#define BPS_INLINE static inline __attribute__((always_inline))

/* Element types and operations; the numbers are those of `base.dtypes.NAMES` and `partition.OPS`. */
enum { BPS_TYPE_F32, BPS_TYPE_F64, BPS_TYPE_F16, BPS_TYPE_BF16, BPS_TYPE_I8, BPS_TYPE_I16, BPS_TYPE_I32, BPS_TYPE_I64, BPS_TYPE_U8, BPS_N_TYPES };
enum { BPS_OP_SUM, BPS_OP_PRODUCT, BPS_OP_MIN, BPS_OP_MAX, BPS_OP_BAND, BPS_OP_BOR, BPS_OP_BXOR, BPS_N_OPS };

typedef uint64_t bps_line __attribute__((vector_size(64)));
typedef uint64_t bps_line_at __attribute__((vector_size(64), aligned(1), may_alias)); /* anywhere in memory */
typedef float bps_f32 __attribute__((vector_size(64)));
typedef double bps_f64 __attribute__((vector_size(64)));
typedef int8_t bps_i8 __attribute__((vector_size(64)));
typedef uint8_t bps_u8 __attribute__((vector_size(64)));
typedef int16_t bps_i16 __attribute__((vector_size(64)));
typedef uint16_t bps_u16 __attribute__((vector_size(64)));
typedef int32_t bps_i32 __attribute__((vector_size(64)));
typedef uint32_t bps_u32 __attribute__((vector_size(64)));
typedef int64_t bps_i64 __attribute__((vector_size(64)));

/* An accumulator: one line; of halves two, the elements with even and with odd index. */
struct bps_sum {
    bps_line a, b;
};

BPS_INLINE bps_line bps_select(bps_line mask, bps_line yes, bps_line no) { return (yes & mask) | (no & ~mask); }

BPS_INLINE int bps_is_half(int type) { return type == BPS_TYPE_F16 || type == BPS_TYPE_BF16; }
BPS_INLINE int bps_is_float(int type) { return type <= BPS_TYPE_BF16; }

/* -- float16 in integers: every processor rounds alike -------------------------------------------------------------- */

BPS_INLINE bps_line bps_widen_f16(bps_u32 word) /* the bits of a float16 in the lower half */
{
    bps_u32 magnitude = word & 0x7fff;
    bps_u32 scaled = (bps_u32)((bps_f32)(magnitude << 13) * 0x1p112f);
    bps_u32 chosen = (bps_u32)bps_select((bps_line)(magnitude >= 0x7c00), (bps_line)(scaled | 0x7f800000u),
                                         (bps_line)scaled);
    return (bps_line)(chosen | (word & 0x8000) << 16);
}

BPS_INLINE bps_u32 bps_narrow_f16(bps_line value) /* likewise; to nearest even */
{
    bps_u32 bits = (bps_u32)value, magnitude = bits & 0x7fffffffu, last = magnitude >> 13 & 1;
    bps_u32 normal = (magnitude - (112u << 23) + (last + 0x0fffu)) >> 13;
    /* the last place of a float32 near 0.5 is 2^-24, that of the subnormals */
    bps_u32 subnormal = (bps_u32)((bps_f32)magnitude + 0.5f) - 0x3f000000u;
    bps_line chosen = bps_select((bps_line)(magnitude < (113u << 23)), (bps_line)subnormal, (bps_line)normal);
    chosen = bps_select((bps_line)(magnitude >= (143u << 23)), (bps_line)((bps_u32){0} + 0x7c00u), chosen);
    chosen = bps_select((bps_line)(magnitude > 0x7f800000u), (bps_line)((bps_u32){0} + 0x7e00u), chosen);
    bps_line sign = bps_select((bps_line)(magnitude > 0x7f800000u), (bps_line)((bps_u32){0}),
                               (bps_line)(bits >> 16 & 0x8000));
    return (bps_u32)(chosen | sign);
}

BPS_INLINE bps_u32 bps_round_bf16(bps_line value) /* the upper half is the bfloat16, the lower one noise */
{
    bps_u32 bits = (bps_u32)value, rounded = bits + ((bits >> 16 & 1) + 0x7fffu);
    bps_f32 number = (bps_f32)value;
    return (bps_u32)bps_select((bps_line)(number != number), (bps_line)((bps_u32){0} + 0x7fc00000u),
                               (bps_line)rounded);
}

/* -- between wire and accumulator ------------------------------------------------------------------------------------ */

BPS_INLINE struct bps_sum bps_widen(int type, bps_line wire)
{
    bps_u32 words = (bps_u32)wire;
    if (type == BPS_TYPE_F16)
        return (struct bps_sum){bps_widen_f16(words & 0xffff), bps_widen_f16(words >> 16)};
    if (type == BPS_TYPE_BF16)
        return (struct bps_sum){(bps_line)(words << 16), (bps_line)(words & 0xffff0000u)};
    return (struct bps_sum){wire, wire};
}

BPS_INLINE bps_line bps_narrow(int type, struct bps_sum sum)
{
    if (type == BPS_TYPE_F16)
        return (bps_line)(bps_narrow_f16(sum.a) | bps_narrow_f16(sum.b) << 16);
    if (type == BPS_TYPE_BF16)
        return (bps_line)(bps_round_bf16(sum.a) >> 16 | (bps_round_bf16(sum.b) & 0xffff0000u));
    return sum.a;
}

BPS_INLINE bps_line bps_combine(int type, int op, bps_line x, bps_line y)
{
    int is_f64 = type == BPS_TYPE_F64, is_f32 = bps_is_float(type) && !is_f64;
    if (op == BPS_OP_BAND)
        return x & y;
    if (op == BPS_OP_BOR)
        return x | y;
    if (op == BPS_OP_BXOR)
        return x ^ y;
    if (op == BPS_OP_SUM || op == BPS_OP_PRODUCT) {
        int adds = op == BPS_OP_SUM;
        if (is_f32)
            return adds ? (bps_line)((bps_f32)x + (bps_f32)y) : (bps_line)((bps_f32)x * (bps_f32)y);
        if (is_f64)
            return adds ? (bps_line)((bps_f64)x + (bps_f64)y) : (bps_line)((bps_f64)x * (bps_f64)y);
        if (type == BPS_TYPE_I8 || type == BPS_TYPE_U8)
            return adds ? (bps_line)((bps_u8)x + (bps_u8)y) : (bps_line)((bps_u8)x * (bps_u8)y);
        if (type == BPS_TYPE_I16)
            return adds ? (bps_line)((bps_u16)x + (bps_u16)y) : (bps_line)((bps_u16)x * (bps_u16)y);
        if (type == BPS_TYPE_I32)
            return adds ? (bps_line)((bps_u32)x + (bps_u32)y) : (bps_line)((bps_u32)x * (bps_u32)y);
        return adds ? x + y : x * y;
    }
    bps_line less, x_is_nan = x ^ x; /* the least and the greatest of numbers and a NaN is NaN */
    if (op == BPS_OP_MAX && !bps_is_float(type)) {
        bps_line other = x;
        x = y;
        y = other;
    }
    if (is_f32) {
        less = op == BPS_OP_MIN ? (bps_line)((bps_f32)x < (bps_f32)y) : (bps_line)((bps_f32)x > (bps_f32)y);
        x_is_nan = (bps_line)((bps_f32)x != (bps_f32)x);
    } else if (is_f64) {
        less = op == BPS_OP_MIN ? (bps_line)((bps_f64)x < (bps_f64)y) : (bps_line)((bps_f64)x > (bps_f64)y);
        x_is_nan = (bps_line)((bps_f64)x != (bps_f64)x);
    } else if (type == BPS_TYPE_I8)
        less = (bps_line)((bps_i8)x < (bps_i8)y);
    else if (type == BPS_TYPE_U8)
        less = (bps_line)((bps_u8)x < (bps_u8)y);
    else if (type == BPS_TYPE_I16)
        less = (bps_line)((bps_i16)x < (bps_i16)y);
    else if (type == BPS_TYPE_I32)
        less = (bps_line)((bps_i32)x < (bps_i32)y);
    else
        less = (bps_line)((bps_i64)x < (bps_i64)y);
    if (op == BPS_OP_MAX && !bps_is_float(type)) /* they were exchanged: the greater one is the one that is not less */
        return bps_select(less, y, x);
    return bps_select(less | x_is_nan, x, y);
}

/* Divide the elements of a line of integers by `divisor`, downwards. */
static __attribute__((noinline, unused)) void bps_divide_integers(int type, void *line, int64_t divisor)
{
#define BPS_DIVIDE(T)                                                                                                  \
    do {                                                                                                               \
        typedef T element __attribute__((may_alias));                                                                  \
        element *elements = (element *)line;                                                                           \
        for (uint32_t i = 0; i < BPS_SUM_LINE / sizeof(T); i++) {                                                      \
            int64_t value = (int64_t)elements[i], quotient = value / divisor;                                          \
            elements[i] = (T)(quotient - (value % divisor < 0));                                                       \
        }                                                                                                              \
    } while (0)
    if (type == BPS_TYPE_I8)
        BPS_DIVIDE(int8_t);
    else if (type == BPS_TYPE_U8)
        BPS_DIVIDE(uint8_t);
    else if (type == BPS_TYPE_I16)
        BPS_DIVIDE(int16_t);
    else if (type == BPS_TYPE_I32)
        BPS_DIVIDE(int32_t);
    else
        BPS_DIVIDE(int64_t);
#undef BPS_DIVIDE
}

BPS_INLINE bps_line bps_divide(int type, bps_line value, int64_t divisor)
{
    if (type == BPS_TYPE_F64)
        return (bps_line)((bps_f64)value / (double)divisor);
    if (bps_is_float(type))
        return (bps_line)((bps_f32)value / (float)divisor);
    bps_divide_integers(type, &value, divisor);
    return value;
}

/* The result of combined inputs: rounded as this machine's partial, divided, rounded, every NaN the quiet one. */
BPS_INLINE bps_line bps_finish(int type, struct bps_sum sum, int64_t divisor)
{
    if (bps_is_half(type)) {
        bps_line partial = bps_narrow(type, sum);
        if (divisor == 1)
            return partial;
        sum = bps_widen(type, partial);
        return bps_narrow(type, (struct bps_sum){bps_divide(type, sum.a, divisor), bps_divide(type, sum.b, divisor)});
    }
    if (divisor != 1)
        sum.a = bps_divide(type, sum.a, divisor);
    if (type == BPS_TYPE_F32)
        return bps_select((bps_line)((bps_f32)sum.a != (bps_f32)sum.a), (bps_line)((bps_u32){0} + 0x7fc00000u), sum.a);
    if (type == BPS_TYPE_F64)
        return bps_select((bps_line)((bps_f64)sum.a != (bps_f64)sum.a),
                          (bps_line)((bps_line){0} + 0x7ff8000000000000u), sum.a);
    return sum.a;
}

/* -- the loop --------------------------------------------------------------------------------------------------------- */

/* One call: inputs in rank order; the result goes to `to`, and to every input but `own` if `back`. `ahead`: memory to
 * fetch into the cache meanwhile, of as many bytes, or NULL. `to` may be an input. */
struct bps_sum_call {
    char *to;
    char *inputs[BPS_SUM_RANKS];
    const char *ahead;
    uint64_t nbytes;
    int64_t divisor;
    uint64_t far_nbytes; /* fetch the lines of other ranks so far before they are read; 0: not */
    int n, own, back;
};

BPS_INLINE bps_line bps_load_line(const char *at) { return (bps_line)*(const bps_line_at *)at; }
BPS_INLINE void bps_store_line(char *at, bps_line line) { *(bps_line_at *)at = (bps_line_at)line; }

BPS_INLINE void bps_sum_lines(int type, int op, int n, const struct bps_sum_call *call, int64_t divisor, int back)
{
    char *inputs[BPS_SUM_RANKS], *to = call->to; /* copies: what is stored could be `call` for all that is known */
    const char *ahead = call->ahead;
    uint64_t nbytes = call->nbytes, far_nbytes = call->far_nbytes;
    int own = call->own;
    for (int r = 0; r < n; r++)
        inputs[r] = call->inputs[r];
    for (uint64_t i = 0; i < nbytes; i += BPS_SUM_LINE) {
        if (ahead != NULL)
            __builtin_prefetch(ahead + i, 0, 2);
        if (far_nbytes != 0)
            for (int r = 0; r < n; r++)
                __builtin_prefetch(inputs[r] + i + far_nbytes, 0, 3);
        struct bps_sum sum = bps_widen(type, bps_load_line(inputs[0] + i));
        for (int r = 1; r < n; r++) {
            struct bps_sum next = bps_widen(type, bps_load_line(inputs[r] + i));
            sum.a = bps_combine(type, op, sum.a, next.a);
            if (bps_is_half(type))
                sum.b = bps_combine(type, op, sum.b, next.b);
        }
        bps_line result = bps_finish(type, sum, divisor);
        if (back)
            for (int r = 0; r < n; r++)
                if (r != own)
                    bps_store_line(inputs[r] + i, result);
        bps_store_line(to + i, result);
    }
}

/* The sum of two float32 has a loop of its own, which keeps every pointer in a register. */
BPS_INLINE void bps_sum_body(int type, int op, const struct bps_sum_call *call)
{
    if (op == BPS_OP_SUM && type == BPS_TYPE_F32 && call->n == 2 && call->divisor == 1) {
        if (call->back)
            bps_sum_lines(type, op, 2, call, 1, 1);
        else
            bps_sum_lines(type, op, 2, call, 1, 0);
    } else
        bps_sum_lines(type, op, call->n, call, call->divisor, call->back);
}

typedef void (*bps_sum_kernel)(const struct bps_sum_call *call);

#define BPS_KERNEL(level, type, op)                                                                                    \
    BPS_TARGET_##level static void bps_sum_##level##_##type##_##op(const struct bps_sum_call *call)                    \
    {                                                                                                                  \
        bps_sum_body(BPS_TYPE_##type, BPS_OP_##op, call);                                                                      \
    }
#define BPS_FLOAT_KERNELS(level, type)                                                                                 \
    BPS_KERNEL(level, type, SUM) BPS_KERNEL(level, type, PRODUCT) BPS_KERNEL(level, type, MIN)                         \
    BPS_KERNEL(level, type, MAX)
#define BPS_INTEGER_KERNELS(level, type)                                                                               \
    BPS_FLOAT_KERNELS(level, type) BPS_KERNEL(level, type, BAND) BPS_KERNEL(level, type, BOR)                          \
    BPS_KERNEL(level, type, BXOR)
#define BPS_FLOAT_ROW(level, type)                                                                                     \
    {bps_sum_##level##_##type##_SUM, bps_sum_##level##_##type##_PRODUCT, bps_sum_##level##_##type##_MIN,               \
     bps_sum_##level##_##type##_MAX, NULL, NULL, NULL}
#define BPS_INTEGER_ROW(level, type)                                                                                   \
    {bps_sum_##level##_##type##_SUM, bps_sum_##level##_##type##_PRODUCT, bps_sum_##level##_##type##_MIN,               \
     bps_sum_##level##_##type##_MAX, bps_sum_##level##_##type##_BAND, bps_sum_##level##_##type##_BOR,                  \
     bps_sum_##level##_##type##_BXOR}
#define BPS_LEVEL(level)                                                                                               \
    BPS_FLOAT_KERNELS(level, F32) BPS_FLOAT_KERNELS(level, F64) BPS_FLOAT_KERNELS(level, F16)                          \
    BPS_FLOAT_KERNELS(level, BF16) BPS_INTEGER_KERNELS(level, I8) BPS_INTEGER_KERNELS(level, I16)                      \
    BPS_INTEGER_KERNELS(level, I32) BPS_INTEGER_KERNELS(level, I64) BPS_INTEGER_KERNELS(level, U8)                     \
    static const bps_sum_kernel bps_kernels_##level[BPS_N_TYPES][BPS_N_OPS] = {                                        \
        BPS_FLOAT_ROW(level, F32), BPS_FLOAT_ROW(level, F64), BPS_FLOAT_ROW(level, F16), BPS_FLOAT_ROW(level, BF16),   \
        BPS_INTEGER_ROW(level, I8), BPS_INTEGER_ROW(level, I16), BPS_INTEGER_ROW(level, I32),                          \
        BPS_INTEGER_ROW(level, I64), BPS_INTEGER_ROW(level, U8)};

#define BPS_TARGET_base
BPS_LEVEL(base)
#if defined(__x86_64__)
#define BPS_TARGET_avx2 __attribute__((target("avx2")))
#define BPS_TARGET_avx512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
BPS_LEVEL(avx2)
BPS_LEVEL(avx512)
#endif

enum { BPS_LEVEL_BASE, BPS_LEVEL_AVX2, BPS_LEVEL_AVX512 };

/* The best level of this processor. */
static inline int bps_sum_level(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return BPS_LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2"))
        return BPS_LEVEL_AVX2;
#endif
    return BPS_LEVEL_BASE;
}

/* The kernel of a type and an operation at a level that the processor has; NULL: there is none. */
static inline bps_sum_kernel bps_sum_kernel_of(int type, int op, int level)
{
    if (type < 0 || type >= BPS_N_TYPES || op < 0 || op >= BPS_N_OPS)
        return NULL;
#if defined(__x86_64__)
    if (level == BPS_LEVEL_AVX512)
        return bps_kernels_avx512[type][op];
    if (level == BPS_LEVEL_AVX2)
        return bps_kernels_avx2[type][op];
#endif
    (void)level;
    return bps_kernels_base[type][op];
}

/* Sum the whole lines of a call, which is what kernels take; how many bytes of its last line are left, after them. */
static inline uint64_t bps_sum_whole(bps_sum_kernel kernel, struct bps_sum_call *call)
{
    uint64_t rest = call->nbytes % BPS_SUM_LINE;
    call->nbytes -= rest;
    if (call->nbytes != 0)
        kernel(call);
    return rest;
}

/* Sum any number of bytes, in the caller's floating-point environment. */
static inline void bps_sum_any(bps_sum_kernel kernel, struct bps_sum_call *call)
{
    uint64_t rest = bps_sum_whole(kernel, call), whole = call->nbytes;
    if (rest == 0)
        return;
    char lines[BPS_SUM_RANKS][BPS_SUM_LINE], result[BPS_SUM_LINE];
    struct bps_sum_call last = {.to = result, .nbytes = BPS_SUM_LINE, .divisor = call->divisor, .n = call->n};
    for (int r = 0; r < call->n; r++) {
        memset(lines[r], 0, BPS_SUM_LINE);
        memcpy(lines[r], call->inputs[r] + whole, rest);
        last.inputs[r] = lines[r];
    }
    kernel(&last);
    for (int r = 0; call->back && r < call->n; r++)
        if (r != call->own)
            memcpy(call->inputs[r] + whole, result, rest);
    memcpy(call->to + whole, result, rest);
}

/* The same where the other ranks' inputs can be read up to the end of their last line, and none gets the result back. */
static inline void bps_sum_any_padded(bps_sum_kernel kernel, struct bps_sum_call *call)
{
    uint64_t rest = bps_sum_whole(kernel, call), whole = call->nbytes;
    if (rest == 0)
        return;
    char own[BPS_SUM_LINE] = {0}, result[BPS_SUM_LINE], *to = call->to + whole;
    for (int r = 0; r < call->n; r++)
        call->inputs[r] += whole;
    memcpy(own, call->inputs[call->own], rest);
    call->inputs[call->own] = own;
    call->to = result;
    call->nbytes = BPS_SUM_LINE;
    kernel(call);
    memcpy(to, result, rest);
}

/* -- the floating-point environment ------------------------------------------------------------------------------------ */

#if defined(__x86_64__)
#define BPS_FLOAT_DEFAULT 0x1f80u /* nearest even, all exceptions masked, subnormals kept */
#define BPS_FLOAT_CONTROL 0xffc0u

/* Take the default environment; returns what `bps_float_leave` restores. */
static inline uint32_t bps_float_enter(void)
{
    uint32_t own = _mm_getcsr();
    if ((own & BPS_FLOAT_CONTROL) != BPS_FLOAT_DEFAULT)
        _mm_setcsr(BPS_FLOAT_DEFAULT);
    return own;
}

static inline void bps_float_leave(uint32_t own)
{
    if ((own & BPS_FLOAT_CONTROL) != BPS_FLOAT_DEFAULT)
        _mm_setcsr(own);
}
#elif defined(__aarch64__)
static inline uint32_t bps_float_enter(void)
{
    uint64_t own;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(own));
    if (own != 0)
        __asm__ __volatile__("msr fpcr, %0" ::"r"((uint64_t)0));
    return (uint32_t)own;
}

static inline void bps_float_leave(uint32_t own)
{
    if (own != 0)
        __asm__ __volatile__("msr fpcr, %0" ::"r"((uint64_t)own));
}
#else
static inline uint32_t bps_float_enter(void) { return 0; }
static inline void bps_float_leave(uint32_t own) { (void)own; }
#endif

/* As `bps_sum_any` and `bps_sum_any_padded`, in the default environment. It is taken for each kernel: between two, a wait
 * may run signal handlers of the caller, which change theirs. */
static inline void bps_sum_run(bps_sum_kernel kernel, struct bps_sum_call *call)
{
    uint32_t own = bps_float_enter();
    bps_sum_any(kernel, call);
    bps_float_leave(own);
}

static inline void bps_sum_run_padded(bps_sum_kernel kernel, struct bps_sum_call *call)
{
    uint32_t own = bps_float_enter();
    bps_sum_any_padded(kernel, call);
    bps_float_leave(own);
}

#pragma GCC diagnostic pop
#endif
