/* Vectors of 512 bits, as AVX-512 has them, and the functions that compact state needs of them. */
#ifndef ZENFLOW_HOST_COMPACT_512_H
#define ZENFLOW_HOST_COMPACT_512_H

#include <immintrin.h>

#include "arithmetic.h"

typedef __m512i Vec;
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Numbers __attribute__((vector_size(64)));
typedef uint16_t Words __attribute__((vector_size(64)));

#define OPERATOR(name, type, op)                                                                  \
    INLINE Vec name(Vec one, Vec two)                                                             \
    {                                                                                             \
        return (Vec)((type)one op(type) two);                                                     \
    }
#define SHIFT(name, op)                                                                           \
    INLINE Vec name(Vec vec, int bits)                                                            \
    {                                                                                             \
        return _mm512_##op(vec, (unsigned)bits);                                                  \
    }
#define INTRINSIC(name, op)                                                                       \
    INLINE Vec name(Vec one, Vec two)                                                             \
    {                                                                                             \
        return _mm512_##op(one, two);                                                             \
    }

/* Places in two vectors: of each element's number, and of that number's higher word. */
#define FOUR(first) (first), (first) + 1, (first) + 2, (first) + 3
#define FOUR_HIGHER(first) 2 * (first) + 1, 2 * (first) + 3, 2 * (first) + 5, 2 * (first) + 7
#define BY_ELEMENT(four)                                                                          \
    four(0), four(16), four(4), four(20), four(8), four(24), four(12), four(28)
#define BY_NUMBER(four) four(0), four(4), four(8), four(12), four(16), four(20), four(24), four(28)

static const uint16_t HIGHER[32] = {BY_ELEMENT(FOUR_HIGHER)},
                      HIGHEST[32] = {BY_NUMBER(FOUR_HIGHER)};
static const uint32_t PLACES[32] = {BY_ELEMENT(FOUR)};

INLINE Vec load(const void *from)
{
    return _mm512_loadu_si512(from);
}

INLINE void store(void *to, Vec vec)
{
    _mm512_storeu_si512(to, vec);
}

INLINE Vec every16(uint32_t word)
{
    return _mm512_set1_epi16((int16_t)word);
}

INLINE Vec every32(uint32_t number)
{
    return _mm512_set1_epi32((int32_t)number);
}

INLINE Vec every_float(float number)
{
    return (Vec)_mm512_set1_ps(number);
}

/* The lowest word everywhere. */
INLINE Vec every_lowest(__m128i words)
{
    return _mm512_broadcastw_epi16(words);
}

INLINE Vec signed_words(const void *bytes)
{
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
}

INLINE Vec unsigned_words(const void *bytes)
{
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
}

/* The lower bytes of the words of two vectors; the higher ones are 0. */
INLINE void store_bytes(void *to, Vec words1, Vec words2)
{
    const Vec chunks = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    store(to, _mm512_permutexvar_epi64(chunks, _mm512_packus_epi16(words1, words2)));
}

/* The higher words of numbers that lie as `a` and `b` after unpacking, in the elements' order. */
INLINE Vec higher_words(Vec a, Vec b)
{
    return _mm512_permutex2var_epi16(a, load(HIGHER), b);
}

INLINE Vec lower_words(Vec a, Vec b)
{
    const Vec lower = _mm512_sub_epi16(load(HIGHER), every16(1));
    return _mm512_permutex2var_epi16(a, lower, b);
}

/* Floats in the elements' order in memory, and as unpacking orders them here. */
INLINE void load_floats(const float *from, Vec *a, Vec *b)
{
    const Vec low = load(from), high = load(from + 16);
    *a = _mm512_shuffle_i64x2(low, high, 0x88);
    *b = _mm512_shuffle_i64x2(low, high, 0xdd);
}

INLINE void store_floats(float *to, Vec a, Vec b)
{
    store(to, _mm512_permutex2var_epi32(a, load(PLACES), b));
    store(to + 16, _mm512_permutex2var_epi32(a, load(PLACES + 16), b));
}

INLINE Vec root_of(Vec floats)
{
    return (Vec)_mm512_sqrt_ps((__m512)floats);
}

INLINE Vec size_of(Vec floats)
{
    return (Vec)_mm512_abs_ps((__m512)floats);
}

/* The larger of two sizes; it may pass over a NaN. */
INLINE Vec larger_size(Vec one, Vec two)
{
    return (Vec)_mm512_range_ps((__m512)one, (__m512)two, 0xb);
}

/* The sum where the code is not 0, else the word. */
INLINE Vec added_where(Vec words, Vec code, Vec base)
{
    return _mm512_mask_add_epi16(words, _mm512_test_epi16_mask(code, code), words, base);
}

/* Bits of `one` where the mask has them, else of the other. */
INLINE Vec selected(Vec mask, Vec one, Vec other)
{
    return _mm512_ternarylogic_epi32(mask, one, other, 0xca);
}

/* The next word where the rest is above the limit. */
INLINE Vec next_where_above(Vec words, Vec rest, Vec limit)
{
    return _mm512_mask_add_epi16(words, _mm512_cmpgt_epu16_mask(rest, limit), words, every16(1));
}

INLINE Vec zero_where_equal(Vec words, Vec others)
{
    return _mm512_maskz_mov_epi16(_mm512_cmpneq_epi16_mask(words, others), words);
}

/* A value where words are at least the limit, or floats less than others; else 0. */
INLINE Vec where_at_least(Vec words, Vec limit, Vec found)
{
    return _mm512_maskz_mov_epi16(_mm512_cmpge_epu16_mask(words, limit), found);
}

INLINE Vec where_less(Vec floats, Vec others, Vec found)
{
    const __mmask16 is_less = _mm512_cmp_ps_mask((__m512)floats, (__m512)others, _CMP_LT_OQ);
    return _mm512_maskz_mov_epi32(is_less, found);
}

INLINE Vec floats_of(Vec numbers)
{
    return (Vec)_mm512_cvtepi32_ps(numbers);
}

INLINE int any_below(Vec words, uint32_t limit)
{
    return _mm512_cmplt_epu16_mask(words, every16(limit)) != 0;
}

INLINE int any_nan(Vec a, Vec b)
{
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_UNORD_Q) != 0;
}

/* A bit for each word, the lowest first: whether it differs. */
INLINE uint32_t differing(Vec words, Vec others)
{
    return _mm512_cmpneq_epi16_mask(words, others);
}

/* Eight words each, the largest among them: of the higher words of sizes, or of bits. */
INLINE void highest_words(Vec first, Vec second, __m128i *of_first, __m128i *of_second)
{
    const Vec eighth = _mm512_permutex2var_epi16(first, load(HIGHEST), second);
    const Vec quarter = _mm512_max_epu16(eighth, _mm512_shuffle_i64x2(eighth, eighth, 0xb1));
    *of_first = _mm512_castsi512_si128(quarter);
    *of_second = _mm512_extracti32x4_epi32(quarter, 2);
}

#endif
