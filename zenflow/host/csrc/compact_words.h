/* Groups of compact state in vectors of 512 bits: their numbers, and the codes of these.
 *
 * A moment's code is in the 16 higher bits of a float32, and so is a bfloat16. These bits alone
 * are taken 32 elements at a time: *words*, in the elements' order. Numbers of 32 bits are in the
 * order in which words unpack, within each 128 bits of a vector. An operation on words takes half
 * as long as one on numbers.
 */
#ifndef ZENFLOW_HOST_COMPACT_WORDS_H
#define ZENFLOW_HOST_COMPACT_WORDS_H

#include "compact.h"

enum { HALF = GROUP / 2 };

OPERATOR(add16, Words, +)
OPERATOR(sub16, Words, -)
OPERATOR(bits_in_both, Numbers, &)
OPERATOR(bits_in_either, Numbers, |)
INTRINSIC(sub16_to_zero, subs_epu16)
INTRINSIC(min16, min_epu16)
INTRINSIC(max16, max_epu16)
INTRINSIC(max32, max_epu32)
INTRINSIC(unpack_low, unpacklo_epi16)
INTRINSIC(unpack_high, unpackhi_epi16)
SHIFT(left16, slli_epi16)
SHIFT(right16, srli_epi16)
SHIFT(signs16, srai_epi16)
SHIFT(right32, srli_epi32)

/* Numbers of a half group, or their bits. */
typedef struct {
    Vec a, b;
} Pair;

#define PAIRWISE(name, type, op)                                                                  \
    OPERATOR(name##_of_vec, type, op)                                                             \
    INLINE Pair name(Pair one, Pair two)                                                          \
    {                                                                                             \
        const Pair pair = {name##_of_vec(one.a, two.a), name##_of_vec(one.b, two.b)};             \
        return pair;                                                                              \
    }
PAIRWISE(plus, Floats, +)
PAIRWISE(minus, Floats, -)
PAIRWISE(times, Floats, *)
PAIRWISE(over, Floats, /)
PAIRWISE(sum_of_bits, Numbers, +)

INLINE Pair all(float number)
{
    const Pair pair = {every_float(number), every_float(number)};
    return pair;
}

INLINE Pair roots(Pair pair)
{
    const Pair found = {root_of(pair.a), root_of(pair.b)};
    return found;
}

INLINE Pair sizes(Pair pair)
{
    const Pair found = {size_of(pair.a), size_of(pair.b)};
    return found;
}

INLINE Vec words_of(Pair pair)
{
    return higher_words(pair.a, pair.b);
}

/* A number's random bits, less its group's first one's: by stream, half and vector. */
#define DRAWN4(odd, element)                                                                      \
    (element) * (odd), ((element) + 1) * (odd), ((element) + 2) * (odd), ((element) + 3) * (odd)
#define DRAWN16(odd, element)                                                                     \
    {DRAWN4(odd, element), DRAWN4(odd, (element) + 8), DRAWN4(odd, (element) + 16),               \
     DRAWN4(odd, (element) + 24)}
#define DRAWN(odd)                                                                                \
    {                                                                                             \
        {DRAWN16(odd, 0), DRAWN16(odd, 4)},                                                       \
        {                                                                                         \
            DRAWN16(odd, HALF), DRAWN16(odd, HALF + 4)                                            \
        }                                                                                         \
    }
static const uint32_t DRAWS[3][2][2][HALF / 2]
    __attribute__((aligned(64))) = {DRAWN(ODD_WEIGHT), DRAWN(ODD_FIRST), DRAWN(ODD_SECOND)};
enum { OF_WEIGHT, OF_FIRST, OF_SECOND };

INLINE Pair unpacked(Vec higher, Vec lower)
{
    const Pair pair = {unpack_low(lower, higher), unpack_high(lower, higher)};
    return pair;
}

INLINE Pair numbers_at(const float *from)
{
    Pair pair;
    load_floats(from, &pair.a, &pair.b);
    return pair;
}

/* Addend of the words of a group's codes, by its exponent byte. */
INLINE Vec base_of(uint32_t exponent)
{
    return every32(exponent * 0x800080u);
}

INLINE Pair decoded_weights(const HostJob *job, int64_t start)
{
    const Vec rest = signed_words(job->low + start);
    return unpacked(add16(load(job->high + start), signs16(rest, 15)), left16(rest, 8));
}

/* Of codes with a sign: first moments, and gradients of eight bits. */
INLINE Pair decoded_signed(const uint8_t *codes, Vec base)
{
    const Vec code = signed_words(codes), placed = bits_in_both(left16(code, 4), every16(0x87f0));
    const Vec size = bits_in_both(code, every16(0x7f));
    return unpacked(added_where(placed, size, base), every16(0));
}

INLINE Pair decoded_second(const uint8_t *codes, Vec base)
{
    const Vec code = unsigned_words(codes);
    return unpacked(added_where(left16(code, 4), code, base), every16(0));
}

/* As to_bfloat16. */
INLINE Vec to_bfloat16_words(Pair values)
{
    const Vec word = words_of(values), rest = lower_words(values.a, values.b);
    const Vec odd = bits_in_both(word, every16(1));
    return next_where_above(word, bits_in_either(rest, odd), every16(0x8000));
}

/* Random bits of a half, from those of its group's first element. */
INLINE Pair drawn(uint32_t key, int stream, int half, int shift)
{
    const Pair first = {every32(key), every32(key)};
    const Pair steps = {load(DRAWS[stream][half][0]), load(DRAWS[stream][half][1])};
    const Pair bits = sum_of_bits(first, steps);
    const Pair pair = {right32(bits.a, shift), right32(bits.b, shift)};
    return pair;
}

/* Writes a half's higher words; returns the bytes that go on. */
INLINE Vec encode_weights(Pair master, uint32_t key, int half, uint16_t *high)
{
    const Pair sum = sum_of_bits(master, drawn(key, OF_WEIGHT, half, 24));
    const Vec rest = lower_words(sum.a, sum.b);
    store(high, sub16(words_of(sum), signs16(rest, 15)));
    return right16(rest, 8);
}

/* Words of a moment that is rounded. */
INLINE Vec rounded(Pair moment, uint32_t key, int stream, int half)
{
    return words_of(sum_of_bits(moment, drawn(key, stream, half, 32 - BITS)));
}

NOINLINE Vec lifted_first(Vec size, Pair exp_avg, uint32_t exponent, uint32_t key, int half)
{
    const Pair random = drawn(key, OF_FIRST, half, 32 - BITS), exact = sizes(exp_avg);
    const Pair numbers = {floats_of(random.a), floats_of(random.b)};
    const float smallest = as_float((8 * exponent + 1) << BITS) * (1.0f / (1 << BITS));
    const Pair bounds = times(numbers, all(smallest));
    const Vec one = every32(16 << 16);
    const Pair lifted = {where_less(bounds.a, exact.a, one), where_less(bounds.b, exact.b, one)};
    return max16(size, words_of(lifted));
}

/* With random bits, no number but 0 has a word below 0x80. */
INLINE Vec lifted_second(Vec size, Vec word)
{
    return max16(size, where_at_least(word, every16(0x80), every16(16)));
}

/* Writes a group's exponent byte, from the inverse of its largest word; returns what is taken from
 * all words of the group. */
INLINE Vec put_exponent(__m128i inverse, int16_t room, uint8_t *byte)
{
    const __m128i largest = _mm_xor_si128(inverse, _mm_set1_epi16(-1));
    const __m128i exponent = _mm_subs_epu16(_mm_srli_epi16(largest, 7), _mm_set1_epi16(room));
    *byte = (uint8_t)_mm_extract_epi8(exponent, 0);
    return every_lowest(_mm_slli_epi16(exponent, 7));
}

#endif
