/* The host's part of an optimizer step: gradient accumulation, and AdamW that writes the
 * low-precision weights in the same pass over memory.
 *
 * Loaded by zenflow/host/library.py with ctypes, so that the interpreter lock is free while it
 * runs and no torch header is needed. It starts no threads: callers, _host_pool.c among them, hand
 * row ranges to their own.
 *
 * Every operation is elementwise and rounded to float32 on its own, in torch.optim.AdamW's order
 * (build with -ffp-contract=off), so the result depends neither on how the work is cut into calls
 * nor on which clone the loader picks. Of the three stages of a tile the outer two convert formats
 * and the middle one is AdamW; between them the tile stays in the first-level cache.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "_host_kernel.h"

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#elif defined(_MSC_VER)
#define INLINE static __forceinline
#define NOINLINE static __declspec(noinline)
#else
#define INLINE static inline
#define NOINLINE static
#endif

/* Clones are picked through the loader's indirect functions, which only glibc has. A build may
 * define CLONES as nothing, to have plain C and to check the clones against it. */
#if !defined(CLONES)
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Elements per tile. Small, so that the loads of one stage overlap the arithmetic of the one
 * before: on two Xeon cores with AVX-512, 128 gave 10% more than 1024 and 7% more than 64. */
#define TILE 128

INLINE float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float from_bfloat16(uint16_t half)
{
    return as_float((uint32_t)half << 16);
}

/* Nearest, ties to even; a NaN keeps its sign and upper payload and becomes quiet. */
INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* No float32 subnormal may appear on the way: it would count as zero. */
INLINE float from_float16(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fffu) << 13;
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t normal = magnitude + ((127u - 15u) << 23);
    /* A subnormal counts steps of 2^-24: put it under the exponent of 2^-14, subtract 2^-14. */
    float subnormal = as_float(magnitude + (113u << 23)) - as_float(113u << 23);
    uint32_t special = magnitude | 0x7f800000u;
    uint32_t finite = magnitude < (1u << 23) ? as_bits(subnormal) : normal;
    return as_float(sign | (magnitude >= (0x7c00u << 13) ? special : finite));
}

/* Nearest, ties to even, overflow to infinity; a NaN keeps its sign and becomes the quiet one. */
INLINE uint16_t to_float16(float value)
{
    uint32_t bits = as_bits(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t sign = (bits >> 16) & 0x8000u;
    /* Rebias and round at bit 13; the carry may rightly reach the exponent, and infinity. */
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* The last place of 0.5 is 2^-24, float16's smallest step: the addition itself rounds. */
    uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);
    uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return (uint16_t)(sign | (magnitude >= 0x47800000u ? special : finite));
}

/* values = scale * grad, or values += scale * grad with the product rounded first. */
INLINE void scale_into(float *restrict values, const void *grad, int dtype, int64_t start,
                       int64_t n, float scale, int add)
{
    const float *restrict wide = (const float *)grad + start;
    const uint16_t *restrict half = (const uint16_t *)grad + start;
    if (dtype == FLOAT32) {
        for (int64_t i = 0; i < n; i++) {
            float term = wide[i] * scale;
            values[i] = add ? values[i] + term : term;
        }
    } else if (dtype == BFLOAT16) {
        for (int64_t i = 0; i < n; i++) {
            float term = from_bfloat16(half[i]) * scale;
            values[i] = add ? values[i] + term : term;
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            float term = from_float16(half[i]) * scale;
            values[i] = add ? values[i] + term : term;
        }
    }
}

/* out = cast(values). */
INLINE void store_cast(void *out, int dtype, int64_t start, int64_t n,
                       const float *restrict values)
{
    uint16_t *restrict half = (uint16_t *)out + start;
    if (dtype == FLOAT32) {
        memcpy((float *)out + start, values, (size_t)n * sizeof(float));
    } else if (dtype == BFLOAT16) {
        for (int64_t i = 0; i < n; i++)
            half[i] = to_bfloat16(values[i]);
    } else {
        for (int64_t i = 0; i < n; i++)
            half[i] = to_float16(values[i]);
    }
}

/* What one call of zenflow_adamw works on. */
typedef struct {
    float *master;
    float *exp_avg;
    float *exp_avg_sq;
    void *out;
    const void *grad;
    const float *acc;
    int out_dtype;
    int grad_dtype;
    float grad_scale;
    float count;
    float beta2;
    float one_minus_beta1;
    float one_minus_beta2;
    float eps;
    float decay;
    float prediction;
} Job;

/* As torch.lerp: from the nearer end, so that beta1 = 0 gives the gradient itself. */
INLINE float next_exp_avg(float old, float g, float rate)
{
    return rate < 0.5f ? old + (g - old) * rate : g + (g - old) * (rate - 1.0f);
}

INLINE float next_exp_avg_sq(float old, float g, float beta2, float rate)
{
    return old * beta2 + rate * g * g;
}

/* AdamW on n elements; tile holds the mean gradient, unless the moments have seen all of them
 * (moves = 0), and afterwards the weights to upload. */
INLINE void update_tile(const Job *job, float *restrict tile, float *restrict master,
                        float *restrict exp_avg, float *restrict exp_avg_sq, int64_t n,
                        float step_size, float denom_scale, int moves)
{
    /* Divisions and roots are what bounds the arithmetic: the one by a constant is multiplied. */
    const float inverse = 1.0f / denom_scale;
    const float beta2 = job->beta2, rate1 = job->one_minus_beta1, rate2 = job->one_minus_beta2;
    const float eps = job->eps, decay = job->decay, prediction = job->prediction;
    for (int64_t i = 0; i < n; i++) {
        float m = exp_avg[i], v = exp_avg_sq[i];
        if (moves) {
            exp_avg[i] = m = next_exp_avg(m, tile[i], rate1);
            exp_avg_sq[i] = v = next_exp_avg_sq(v, tile[i], beta2, rate2);
        }
        float denom = sqrtf(v) * inverse + eps;
        float delta = step_size * m / denom;
        float w = master[i] * decay - delta;
        master[i] = w;
        tile[i] = w - prediction * delta;
    }
}

/* The functions with clones are not inlined, also because the compiler must move no
 * arithmetic across the change of mode in their callers. */
CLONES NOINLINE void accumulate(float *acc, const void *grad, int dtype, int64_t n, float scale,
                                int first)
{
    if (first)
        scale_into(acc, grad, dtype, 0, n, scale, 0);
    else
        scale_into(acc, grad, dtype, 0, n, scale, 1);
}

CLONES NOINLINE void moments(float *restrict exp_avg, float *restrict exp_avg_sq,
                             const void *grad, int dtype, int64_t size, float scale,
                             float beta2, float rate1, float rate2)
{
    float tile[TILE];
    for (int64_t start = 0; start < size; start += TILE) {
        const int64_t n = size - start < TILE ? size - start : TILE;
        scale_into(tile, grad, dtype, start, n, scale, 0);
        for (int64_t i = 0; i < n; i++) {
            exp_avg[start + i] = next_exp_avg(exp_avg[start + i], tile[i], rate1);
            exp_avg_sq[start + i] = next_exp_avg_sq(exp_avg_sq[start + i], tile[i], beta2, rate2);
        }
    }
}

INLINE void run_tile(const Job *job, int64_t start, int64_t n, float step_size,
                     float denom_scale)
{
    float tile[TILE];
    float *master = job->master + start, *exp_avg = job->exp_avg + start;
    float *exp_avg_sq = job->exp_avg_sq + start;
    if (job->acc)
        memcpy(tile, job->acc + start, (size_t)n * sizeof(float));
    if (job->acc && job->grad)
        scale_into(tile, job->grad, job->grad_dtype, start, n, job->grad_scale, 1);
    else if (job->grad)
        scale_into(tile, job->grad, job->grad_dtype, start, n, job->grad_scale, 0);
    if (job->count != 1.0f)
        for (int64_t i = 0; i < n; i++)
            tile[i] /= job->count;
    if (job->acc || job->grad)
        update_tile(job, tile, master, exp_avg, exp_avg_sq, n, step_size, denom_scale, 1);
    else
        update_tile(job, tile, master, exp_avg, exp_avg_sq, n, step_size, denom_scale, 0);
    store_cast(job->out, job->out_dtype, start, n, tile);
}

/* Whole tiles have a length that the compiler knows: its loops over them have no remainders. */
CLONES NOINLINE void update_run(const Job *job, int64_t begin, int64_t end, float step_size,
                                float denom_scale)
{
    int64_t start = begin;
    for (; start + TILE <= end; start += TILE)
        run_tile(job, start, TILE, step_size, denom_scale);
    if (start < end)
        run_tile(job, start, end - start, step_size, denom_scale);
}

CLONES NOINLINE void copy_run(const Job *job, int64_t begin, int64_t end)
{
    store_cast(job->out, job->out_dtype, begin, end - begin, job->master + begin);
}

/* Subnormals count as zeros while a kernel runs. The first moment of a weight whose gradient stays
 * zero (an absent token's embedding, a dead unit) decays into the subnormals and stays there, and
 * on x86 arithmetic on them is ten times slower. Such values mean nothing to an update. */
#if defined(__SSE__) || defined(_M_X64)
INLINE uint64_t flush_subnormals(void)
{
    unsigned int mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040u);
    return mode;
}

INLINE void restore_mode(uint64_t mode)
{
    _mm_setcsr((unsigned int)mode);
}
#elif defined(__aarch64__) && defined(__GNUC__)
INLINE uint64_t flush_subnormals(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | ((uint64_t)1 << 24)) : "memory");
    return mode;
}

INLINE void restore_mode(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}
#else
#define flush_subnormals() 0u
#define restore_mode(mode) (void)(mode)
#endif

EXPORT int zenflow_interface(void)
{
    return INTERFACE;
}

EXPORT void zenflow_accumulate(float *acc, const void *grad, int dtype, int64_t n, float scale,
                               int first)
{
    const uint64_t mode = flush_subnormals();
    accumulate(acc, grad, dtype, n, scale, first);
    restore_mode(mode);
}

EXPORT void zenflow_moments(float *exp_avg, float *exp_avg_sq, const void *grad, int dtype,
                            int64_t n, float scale, float beta2, float one_minus_beta1,
                            float one_minus_beta2)
{
    const uint64_t mode = flush_subnormals();
    moments(exp_avg, exp_avg_sq, grad, dtype, n, scale, beta2, one_minus_beta1, one_minus_beta2);
    restore_mode(mode);
}

/* Without grad and acc the moments stay as they are, and only the weights move.
 * `out` may be `grad`: a tile's gradient has been read when its weights are written.
 * Neighbouring rows with the same constants run as one, so that short rows vectorise too. */
EXPORT void zenflow_adamw(float *master, float *exp_avg, float *exp_avg_sq, void *out,
                          int out_dtype, const void *grad, int grad_dtype, float grad_scale,
                          const float *acc, float count, int64_t rows, int64_t cols,
                          const float *step_size, const float *denom_scale, const uint8_t *active,
                          float beta2, float one_minus_beta1, float one_minus_beta2, float eps,
                          float decay, float prediction)
{
    const Job job = {master, exp_avg, exp_avg_sq, out, grad, acc, out_dtype, grad_dtype,
                     grad_scale, count, beta2, one_minus_beta1, one_minus_beta2, eps, decay,
                     prediction};
    const uint64_t mode = flush_subnormals();
    for (int64_t row = 0, next; row < rows; row = next) {
        next = row + 1;
        while (next < rows && active[next] == active[row] && step_size[next] == step_size[row]
               && denom_scale[next] == denom_scale[row])
            next++;
        if (active[row])
            update_run(&job, row * cols, next * cols, step_size[row], denom_scale[row]);
        else
            copy_run(&job, row * cols, next * cols);
    }
    restore_mode(mode);
}

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_host_kernel", "The host kernel, called through ctypes.", -1,
    NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__host_kernel(void)
{
    return PyModule_Create(&definition);
}
