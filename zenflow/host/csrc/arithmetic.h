/* The arithmetic that the host's kernels share: casts, and AdamW steps on a tile.
 *
 * Every operation is elementwise and rounded to float32 on its own, in torch.optim.AdamW's order
 * (build with -ffp-contract=off), so the result depends neither on how rows and steps are cut into
 * calls nor on which clone the loader picks.
 */
#ifndef ZENFLOW_HOST_ARITHMETIC_H
#define ZENFLOW_HOST_ARITHMETIC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernel.h"

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

/* Bits of the widest vectors: a build may take 256, to be as on a processor without AVX-512. */
#if !defined(WIDEST)
#define WIDEST 512
#endif

/* Clones are picked through the loader's indirect functions, which only glibc has. A build may
 * define CLONES as nothing, to have plain C and to check the clones against it. */
#if !defined(CLONES)
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if WIDEST == 512
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES __attribute__((target_clones("avx2", "default")))
#endif
#define HAS_CLONES
#else
#define CLONES
#endif
#endif

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2, E4M3 = 3 };

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

/* Exponent byte of a group that has infinity or NaN. */
#define NOT_FINITE 240u

/* Row of a gradient of eight bits, as e4m3.py has it: its codes, then the exponent bytes of its groups. */
INLINE const uint8_t *row_of(const void *grad, int64_t cols, int64_t row)
{
    return (const uint8_t *)grad + row * (cols + (cols + GROUP - 1) / GROUP);
}

/* values = scale * grad for n elements of a row, from element `at` on, all of one group. */
INLINE void scale_group(float *restrict values, const uint8_t *restrict row, int64_t cols,
                        int64_t at, int64_t n, float scale)
{
    const uint32_t exponent = row[cols + at / GROUP];
    const float factor = exponent == NOT_FINITE ? as_float(0x7fc00000u) : scale;
    const uint16_t base = (uint16_t)(exponent << 7);
    const uint8_t *restrict codes = row + at;
    uint16_t words[GROUP]; /* the floats' higher halves: loops on these take half as long */
    for (int64_t i = 0; i < n; i++) {
        const uint16_t size = (uint16_t)((codes[i] & 0x7fu) << 4);
        words[i] = (uint16_t)((size ? size + base : 0) | (codes[i] & 0x80u) << 8);
    }
    for (int64_t i = 0; i < n; i++)
        values[i] = as_float((uint32_t)words[i] << 16) * factor;
}

/* values = scale * grad for n elements from element `at` of a row on, in later rows too. */
INLINE void scale_groups(float *restrict values, const void *grad, int64_t cols, int64_t row,
                         int64_t at, int64_t n, float scale)
{
    for (int64_t done = 0, count; done < n; done += count) {
        const int64_t of_group = GROUP - at % GROUP, of_row = cols - at, rest = n - done;
        count = of_group < of_row ? of_group : of_row;
        count = count < rest ? count : rest;
        if (count == GROUP) /* a length that the compiler knows */
            scale_group(values + done, row_of(grad, cols, row), cols, at, GROUP, scale);
        else
            scale_group(values + done, row_of(grad, cols, row), cols, at, count, scale);
        at += count;
        if (at == cols) {
            at = 0;
            row++;
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

/* Bytes of a row's marks: whole words, of a bit for each element. */
INLINE int64_t mark_bytes(int64_t cols)
{
    return (cols + GROUP - 1) / GROUP * (GROUP / 8);
}

/* A bit for each of n elements, the lowest first: whether it is another one than before. */
INLINE void mark(uint8_t *restrict marks, const uint16_t *restrict before,
                 const uint16_t *restrict now, int64_t n)
{
    uint8_t differs[TILE];
    memset(differs, 0, sizeof differs);
    for (int64_t i = 0; i < n; i++)
        differs[i] = before[i] != now[i];
    for (int64_t byte = 0; byte < mark_bytes(n); byte++) {
        uint64_t eight; /* ones and zeros, of which each is moved to a bit of the highest byte */
        memcpy(&eight, differs + 8 * byte, sizeof eight);
        marks[byte] = (uint8_t)(eight * 0x0102040810204080u >> 56);
    }
}

/* An upload's weights, of a tile at most. Where there are marks, `out` has the upload before, and
 * the tile is of one row, from a multiple of 64 elements on. */
INLINE void store_upload(const HostJob *job, int64_t start, int64_t n, const float *restrict values)
{
    if (!job->repeatable) {
        store_cast(job->out, job->out_dtype, start, n, values);
        return;
    }
    uint16_t now[TILE], *out = (uint16_t *)job->out + start;
    store_cast(now, job->out_dtype == FLOAT16 ? FLOAT16 : BFLOAT16, 0, n, values);
    for (int64_t i = 0; i < n; i++)
        now[i] = now[i] == 0x8000u ? 0 : now[i];
    if (job->marks) {
        const int64_t row = start / job->cols, at = start - row * job->cols;
        mark(job->marks + row * mark_bytes(job->cols) + at / 8, out, now, n);
    }
    memcpy(out, now, (size_t)n * sizeof *now);
}

/* The job that writes the upload before once more, of rows that have taken no step since. */
static inline HostJob former_of(const HostJob *job)
{
    HostJob former = *job;
    former.upload = job->former;
    former.lead = job->former_lead;
    former.num_steps = 0;
    former.marks = 0;
    return former;
}

/* As torch.lerp: from the nearer end, so that beta1 = 0 gives the gradient itself. */
INLINE float next_exp_avg(float old, float g, float rate)
{
    return rate < 0.5f ? old + (g - old) * rate : g + (g - old) * (rate - 1.0f);
}

INLINE float next_exp_avg_sq(float old, float g, float beta2, float rate)
{
    return old * beta2 + rate * g * g;
}

/* A step's constants for rows that have taken equally many before. */
typedef struct {
    float step_size;
    float inverse_denom_scale;
    float beta2;
    float one_minus_beta1;
    float one_minus_beta2;
} Scales;

/* step_size = lr / (1 - beta1^t) and denom_scale = sqrt(1 - beta2^t), in double until the end, as
 * torch computes them in Python's floats. Divisions and roots are what bounds the arithmetic: the
 * division by denom_scale is a multiplication. */
static inline Scales scales_of(const AdamStep *step, int64_t count)
{
    const double t = (double)count;
    const float denom_scale = (float)sqrt(1.0 - pow(step->beta2, t));
    const Scales scales = {(float)(step->lr / (1.0 - pow(step->beta1, t))), 1.0f / denom_scale,
                           (float)step->beta2, (float)(1.0 - step->beta1),
                           (float)(1.0 - step->beta2)};
    return scales;
}

/* One AdamW step on n elements. The tile holds the gradient, and afterwards the displacement. */
INLINE void step_tile(const AdamStep *step, const Scales *scales, float *restrict tile,
                      float *restrict master, float *restrict exp_avg, float *restrict exp_avg_sq,
                      int64_t n)
{
    const float beta2 = scales->beta2, rate1 = scales->one_minus_beta1;
    const float rate2 = scales->one_minus_beta2, step_size = scales->step_size;
    const float inverse = scales->inverse_denom_scale, eps = step->eps, decay = step->decay;
    for (int64_t i = 0; i < n; i++) {
        float g = tile[i];
        float m = next_exp_avg(exp_avg[i], g, rate1);
        float v = next_exp_avg_sq(exp_avg_sq[i], g, beta2, rate2);
        float delta = step_size * m / (sqrtf(v) * inverse + eps);
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = master[i] * decay - delta;
        tile[i] = delta;
    }
}

/* The same on gradients that have been divided by the root of their second moment. */
INLINE void step_divided_tile(const AdamStep *step, const Scales *scales, float *restrict tile,
                              float *restrict master, float *restrict exp_avg, int64_t n)
{
    const float rate1 = scales->one_minus_beta1, step_size = scales->step_size;
    const float decay = step->decay;
    for (int64_t i = 0; i < n; i++) {
        float m = next_exp_avg(exp_avg[i], tile[i], rate1);
        float delta = step_size * m;
        exp_avg[i] = m;
        master[i] = master[i] * decay - delta;
        tile[i] = delta;
    }
}

/* The displacement that a step without a gradient would have, left in the tile. */
INLINE void displace_tile(const AdamStep *step, const Scales *scales, float *restrict tile,
                          const float *restrict exp_avg, const float *restrict exp_avg_sq,
                          int64_t n)
{
    const float step_size = scales->step_size, inverse = scales->inverse_denom_scale;
    const float eps = step->eps;
    for (int64_t i = 0; i < n; i++)
        tile[i] = step_size * exp_avg[i] / (sqrtf(exp_avg_sq[i]) * inverse + eps);
}

INLINE void displace_divided_tile(const Scales *scales, float *restrict tile,
                                  const float *restrict exp_avg, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        tile[i] = scales->step_size * exp_avg[i];
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

#endif
