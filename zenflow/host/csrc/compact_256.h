/* Vectors of 512 bits as two of AVX2, with the functions that compact_512.h has. */
#ifndef ZENFLOW_HOST_COMPACT_256_H
#define ZENFLOW_HOST_COMPACT_256_H

#include <immintrin.h>

#include "arithmetic.h"

typedef struct {
    __m256i low, high;
} Vec;
typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Numbers __attribute__((vector_size(32)));
typedef uint16_t Words __attribute__((vector_size(32)));

#define FUNCTION(name, parameters, of_low, of_high)                                               \
    INLINE Vec name parameters                                                                    \
    {                                                                                             \
        const Vec found = {(__m256i)(of_low), (__m256i)(of_high)};                                \
        return found;                                                                             \
    }
#define OF_ONE(name, half) FUNCTION(name, (Vec vec), half(vec.low), half(vec.high))
#define OF_TWO(name, half)                                                                        \
    FUNCTION(name, (Vec one, Vec two), half(one.low, two.low), half(one.high, two.high))
#define OF_THREE(name, half)                                                                      \
    FUNCTION(name, (Vec one, Vec two, Vec three), half(one.low, two.low, three.low),              \
             half(one.high, two.high, three.high))

#define OPERATOR(name, type, op)                                                                  \
    FUNCTION(name, (Vec one, Vec two), (type)one.low op(type) two.low,                            \
             (type)one.high op(type) two.high)
#define INTRINSIC(name, op) OF_TWO(name, _mm256_##op)
#define SHIFT(name, op)                                                                           \
    FUNCTION(name, (Vec vec, int bits), _mm256_##op(vec.low, bits), _mm256_##op(vec.high, bits))
#define EVERY(name, parameter, value) FUNCTION(name, (parameter), value, value)

EVERY(every16, uint32_t word, _mm256_set1_epi16((int16_t)word))
EVERY(every32, uint32_t number, _mm256_set1_epi32((int32_t)number))
EVERY(every_float, float number, _mm256_set1_ps(number))
EVERY(every_lowest, __m128i words, _mm256_broadcastw_epi16(words))

FUNCTION(load, (const void *from), _mm256_loadu_si256((const __m256i *)from),
         _mm256_loadu_si256((const __m256i *)from + 1))

INLINE void store(void *to, Vec vec)
{
    _mm256_storeu_si256((__m256i *)to, vec.low);
    _mm256_storeu_si256((__m256i *)to + 1, vec.high);
}

INLINE __m128i sixteen(const void *bytes, int part)
{
    return _mm_loadu_si128((const __m128i *)bytes + part);
}

FUNCTION(signed_words, (const void *bytes), _mm256_cvtepi8_epi16(sixteen(bytes, 0)),
         _mm256_cvtepi8_epi16(sixteen(bytes, 1)))
FUNCTION(unsigned_words, (const void *bytes), _mm256_cvtepu8_epi16(sixteen(bytes, 0)),
         _mm256_cvtepu8_epi16(sixteen(bytes, 1)))

INLINE __m256i bytes_of(Vec words)
{
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(words.low, words.high), 0xd8);
}

INLINE void store_bytes(void *to, Vec words1, Vec words2)
{
    const Vec bytes = {bytes_of(words1), bytes_of(words2)};
    store(to, bytes);
}

/* Packing undoes the unpacking: both go by 128 bits. */
INLINE __m256i half_of_higher(__m256i a, __m256i b)
{
    return _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
}

INLINE __m256i half_of_lower(__m256i a, __m256i b)
{
    const __m256i zero = _mm256_setzero_si256();
    return _mm256_packus_epi32(_mm256_blend_epi16(a, zero, 0xaa),
                               _mm256_blend_epi16(b, zero, 0xaa));
}

OF_TWO(higher_words, half_of_higher)
OF_TWO(lower_words, half_of_lower)

INLINE void load_floats(const float *from, Vec *a, Vec *b)
{
    const Vec one = load(from), two = load(from + 16);
    a->low = _mm256_permute2x128_si256(one.low, one.high, 0x20);
    b->low = _mm256_permute2x128_si256(one.low, one.high, 0x31);
    a->high = _mm256_permute2x128_si256(two.low, two.high, 0x20);
    b->high = _mm256_permute2x128_si256(two.low, two.high, 0x31);
}

INLINE void store_floats(float *to, Vec a, Vec b)
{
    const Vec one = {_mm256_permute2x128_si256(a.low, b.low, 0x20),
                     _mm256_permute2x128_si256(a.low, b.low, 0x31)};
    const Vec two = {_mm256_permute2x128_si256(a.high, b.high, 0x20),
                     _mm256_permute2x128_si256(a.high, b.high, 0x31)};
    store(to, one);
    store(to + 16, two);
}

INLINE __m256 root_of_half(__m256i floats)
{
    return _mm256_sqrt_ps((__m256)floats);
}

INLINE __m256i without_sign(__m256i floats)
{
    return _mm256_and_si256(floats, _mm256_set1_epi32(0x7fffffff));
}

INLINE __m256i larger_without_sign(__m256i one, __m256i two)
{
    return _mm256_max_epu32(without_sign(one), without_sign(two));
}

OF_ONE(root_of, root_of_half)
OF_ONE(floats_of, _mm256_cvtepi32_ps)
OF_ONE(size_of, without_sign)
OF_TWO(larger_size, larger_without_sign)

/* Ones in all bits of the words that are at least the others, without a sign. */
INLINE __m256i at_least(__m256i words, __m256i others)
{
    return _mm256_cmpeq_epi16(_mm256_max_epu16(words, others), words);
}

INLINE __m256i half_added_where(__m256i words, __m256i code, __m256i base)
{
    const __m256i is_zero = _mm256_cmpeq_epi16(code, _mm256_setzero_si256());
    return _mm256_add_epi16(words, _mm256_andnot_si256(is_zero, base));
}

INLINE __m256i half_selected(__m256i mask, __m256i one, __m256i other)
{
    return _mm256_or_si256(_mm256_and_si256(mask, one), _mm256_andnot_si256(mask, other));
}

INLINE __m256i half_next_where_above(__m256i words, __m256i rest, __m256i limit)
{
    const __m256i at_most_limit = at_least(limit, rest), ones = _mm256_set1_epi16(1);
    return _mm256_add_epi16(words, _mm256_andnot_si256(at_most_limit, ones));
}

INLINE __m256i half_zero_where_equal(__m256i words, __m256i others)
{
    return _mm256_andnot_si256(_mm256_cmpeq_epi16(words, others), words);
}

INLINE __m256i half_where_at_least(__m256i words, __m256i limit, __m256i found)
{
    return _mm256_and_si256(at_least(words, limit), found);
}

INLINE __m256i half_where_less(__m256i floats, __m256i others, __m256i found)
{
    const __m256 is_less = _mm256_cmp_ps((__m256)floats, (__m256)others, _CMP_LT_OQ);
    return _mm256_and_si256((__m256i)is_less, found);
}

OF_THREE(added_where, half_added_where)
OF_THREE(selected, half_selected)
OF_THREE(next_where_above, half_next_where_above)
OF_TWO(zero_where_equal, half_zero_where_equal)
OF_THREE(where_at_least, half_where_at_least)
OF_THREE(where_less, half_where_less)

INLINE int any_below(Vec words, uint32_t limit)
{
    const __m256i least = _mm256_min_epu16(words.low, words.high);
    const __m256i missing = _mm256_subs_epu16(_mm256_set1_epi16((int16_t)limit), least);
    return !_mm256_testz_si256(missing, missing);
}

INLINE int any_nan(Vec a, Vec b)
{
    const __m256 low = _mm256_cmp_ps((__m256)a.low, (__m256)b.low, _CMP_UNORD_Q);
    const __m256 high = _mm256_cmp_ps((__m256)a.high, (__m256)b.high, _CMP_UNORD_Q);
    return _mm256_movemask_ps(_mm256_or_ps(low, high)) != 0;
}

INLINE uint32_t differing(Vec words, Vec others)
{
    const __m256i bytes = _mm256_packs_epi16(_mm256_cmpeq_epi16(words.low, others.low),
                                             _mm256_cmpeq_epi16(words.high, others.high));
    return ~(uint32_t)_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xd8));
}

INLINE void highest_words(Vec first, Vec second, __m128i *of_first, __m128i *of_second)
{
    const __m256i one = _mm256_srli_epi32(_mm256_max_epu32(first.low, first.high), 16);
    const __m256i two = _mm256_srli_epi32(_mm256_max_epu32(second.low, second.high), 16);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(one, two), 0xd8);
    *of_first = _mm256_castsi256_si128(words);
    *of_second = _mm256_extracti128_si256(words, 1);
}

#endif
