/* Groups of compact state in registers of 512 bits: their numbers, and the codes of these.
 *
 * A moment's code is in the 16 higher bits of a float32, and so is a bfloat16. These bits alone
 * are taken 32 elements at a time: *words*, in the elements' order. Numbers of 32 bits are in the
 * order in which words unpack, within each 128 bits of a register. What is done on words costs
 * half of what it costs on numbers.
 */
#ifndef ZENFLOW_HOST_COMPACT_WORDS_H
#define ZENFLOW_HOST_COMPACT_WORDS_H

#include <immintrin.h>

#include "_host_compact.h"

enum { HALF = GROUP / 2 };

/* Numbers of a half group, or their bits. */
typedef struct {
    __m512i a, b;
} Pair;

/* Where numbers and words are, and random bits: the same for all groups. */
typedef struct {
    Pair elements;   /* element of each number */
    Pair numbers;    /* number of each element */
    __m512i lower;   /* each element's lower word in the two registers */
    __m512i higher;
    __m512i highest; /* all higher words of the first register, then those of the second */
    Pair draws[3][2]; /* by stream and half: a number's random bits, less its group's first one's */
    __m512i chunks;   /* each chunk of 64 bits of the group's bytes, as `packus` leaves them */
    __m512i size;    /* constants in memory: bits of a word without its sign */
    __m512i code;    /* bits of a first moment's code without its sign */
    __m512i placed;  /* its bits in a word, with the sign */
    __m512i sign8;   /* its sign */
    __m512i one;     /* the smallest code in a word */
    __m512i odd;     /* a word's lowest bit */
    __m512i half;    /* its highest one: half of what is rounded off */
    __m512i finite;  /* the inverse of the largest finite word */
    __m128i first;   /* octaves from a group's byte to its largest exponent, by moment */
    __m128i second;
} Order;

static void fill_order(Order *order)
{
    order->size = _mm512_set1_epi16(0x7fff);
    order->code = _mm512_set1_epi16(0x7f);
    order->placed = _mm512_set1_epi16((int16_t)0x87f0);
    order->sign8 = _mm512_set1_epi16(0x80);
    order->one = _mm512_set1_epi16(16);
    order->odd = _mm512_set1_epi16(1);
    order->half = _mm512_set1_epi16((int16_t)0x8000);
    order->finite = _mm512_set1_epi16((int16_t)0x807f);
    order->first = _mm_set1_epi16(ROOM_FIRST);
    order->second = _mm_set1_epi16(ROOM_SECOND);
    const uint32_t odd[3] = {ODD_WEIGHT, ODD_FIRST, ODD_SECOND};
    int32_t elements[32], numbers[32];
    int16_t lower[32], highest[32];
    for (int number = 0; number < 32; number++) {
        const int element = number % 16 / 4 * 8 + number / 16 * 4 + number % 4;
        elements[number] = element;
        numbers[element] = number;
        lower[element] = (int16_t)(2 * number);
        highest[number] = (int16_t)(2 * number + 1);
    }
    memcpy(&order->elements, elements, sizeof elements);
    memcpy(&order->numbers, numbers, sizeof numbers);
    memcpy(&order->lower, lower, sizeof lower);
    memcpy(&order->highest, highest, sizeof highest);
    order->higher = _mm512_add_epi16(order->lower, _mm512_set1_epi16(1));
    for (int stream = 0; stream < 3; stream++) {
        const __m512i step = _mm512_set1_epi32((int32_t)odd[stream]);
        for (int half = 0; half < 2; half++) {
            const __m512i first = _mm512_set1_epi32(half * HALF);
            Pair *draws = &order->draws[stream][half];
            draws->a = _mm512_mullo_epi32(_mm512_add_epi32(order->elements.a, first), step);
            draws->b = _mm512_mullo_epi32(_mm512_add_epi32(order->elements.b, first), step);
        }
    }
    order->chunks = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
}

INLINE Pair unpacked(__m512i higher, __m512i lower)
{
    const Pair pair = {_mm512_unpacklo_epi16(lower, higher), _mm512_unpackhi_epi16(lower, higher)};
    return pair;
}

INLINE __m512i words_of(Pair pair, __m512i which)
{
    return _mm512_permutex2var_epi16(pair.a, which, pair.b);
}

INLINE __m256i bytes_at(const void *from)
{
    return _mm256_loadu_si256((const __m256i *)from);
}

/* The lower bytes of a group's words; the higher ones are 0. */
INLINE void put_bytes(void *to, __m512i words1, __m512i words2, const Order *order)
{
    const __m512i packed = _mm512_packus_epi16(words1, words2);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order->chunks, packed));
}

/* Numbers from memory, where they are in the elements' order, and back. */
INLINE Pair numbers_at(const float *from, const Order *order)
{
    const __m512i low = _mm512_loadu_si512(from), high = _mm512_loadu_si512(from + 16);
    const Pair pair = {_mm512_permutex2var_epi32(low, order->elements.a, high),
                       _mm512_permutex2var_epi32(low, order->elements.b, high)};
    return pair;
}

INLINE void put_numbers(float *to, Pair pair, const Order *order)
{
    _mm512_storeu_si512(to, _mm512_permutex2var_epi32(pair.a, order->numbers.a, pair.b));
    _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi32(pair.a, order->numbers.b, pair.b));
}

INLINE __m512i every(int16_t word)
{
    return _mm512_set1_epi16(word);
}

/* What an exponent byte adds to the words of its group's codes. */
INLINE __m512i base_of(uint32_t exponent)
{
    return _mm512_set1_epi32((int32_t)(exponent * 0x800080u));
}

INLINE Pair decoded_weights(const HostJob *job, int64_t start)
{
    const __m512i rest = _mm512_cvtepi8_epi16(bytes_at(job->low + start));
    const __m512i higher =
        _mm512_add_epi16(_mm512_loadu_si512(job->high + start), _mm512_srai_epi16(rest, 15));
    return unpacked(higher, _mm512_slli_epi16(rest, 8));
}

/* Of codes with a sign: first moments, and gradients of eight bits. */
INLINE Pair decoded_signed(const uint8_t *codes, __m512i base, const Order *order)
{
    const __m512i code = _mm512_cvtepi8_epi16(bytes_at(codes));
    const __m512i placed = _mm512_and_si512(_mm512_slli_epi16(code, 4), order->placed);
    const __mmask32 some = _mm512_test_epi16_mask(code, order->code);
    return unpacked(_mm512_mask_add_epi16(placed, some, placed, base), _mm512_setzero_si512());
}

INLINE Pair decoded_second(const uint8_t *codes, __m512i base)
{
    const __m512i code = _mm512_cvtepu8_epi16(bytes_at(codes));
    const __mmask32 some = _mm512_test_epi16_mask(code, code);
    return unpacked(_mm512_maskz_add_epi16(some, _mm512_slli_epi16(code, 4), base),
                    _mm512_setzero_si512());
}

/* Rounded words, with a quiet NaN for each NaN. */
NOINLINE __m512i with_nan(__m512i nearest, Pair values, const Order *order)
{
    const Pair is_nan = {
        _mm512_movm_epi32(_mm512_cmp_ps_mask((__m512)values.a, (__m512)values.a, _CMP_UNORD_Q)),
        _mm512_movm_epi32(_mm512_cmp_ps_mask((__m512)values.b, (__m512)values.b, _CMP_UNORD_Q))};
    const __m512i quiet = _mm512_or_si512(words_of(values, order->higher), every(0x40));
    return _mm512_mask_mov_epi16(nearest, _mm512_movepi16_mask(words_of(is_nan, order->higher)),
                                 quiet);
}

/* As to_bfloat16. */
INLINE __m512i to_bfloat16_words(Pair values, const Order *order)
{
    const __m512i word = words_of(values, order->higher), rest = words_of(values, order->lower);
    /* rest | (word & odd) */
    const __m512i most = _mm512_ternarylogic_epi32(rest, word, order->odd, 0xf8);
    const __mmask32 is_up = _mm512_cmpgt_epu16_mask(most, order->half);
    const __m512i nearest = _mm512_mask_add_epi16(word, is_up, word, order->odd);
    const __mmask16 some = _mm512_cmp_ps_mask((__m512)values.a, (__m512)values.b, _CMP_UNORD_Q);
    return __builtin_expect(some != 0, 0) ? with_nan(nearest, values, order) : nearest;
}

/* Random bits of a half, from those of its group's first element. */
INLINE Pair drawn(uint32_t key, const Pair *draws, uint32_t shift)
{
    const __m512i first = _mm512_set1_epi32((int32_t)key);
    const Pair pair = {_mm512_srli_epi32(_mm512_add_epi32(first, draws->a), shift),
                       _mm512_srli_epi32(_mm512_add_epi32(first, draws->b), shift)};
    return pair;
}

INLINE Pair sum_of(Pair one, Pair other)
{
    const Pair pair = {_mm512_add_epi32(one.a, other.a), _mm512_add_epi32(one.b, other.b)};
    return pair;
}

/* Writes a half's higher words; returns the bytes that go on. */
INLINE __m512i encode_weights(Pair master, uint32_t key, const Pair *draws, const Order *order,
                              uint16_t *high)
{
    const Pair sum = sum_of(master, drawn(key, draws, 24));
    const __m512i rest = words_of(sum, order->lower), word = words_of(sum, order->higher);
    _mm512_storeu_si512(high, _mm512_sub_epi16(word, _mm512_srai_epi16(rest, 15)));
    return _mm512_srli_epi16(rest, 8);
}

/* Words of a moment that is rounded. */
INLINE __m512i rounded(Pair moment, uint32_t key, const Pair *draws, const Order *order)
{
    return words_of(sum_of(moment, drawn(key, draws, 32 - BITS)), order->higher);
}

INLINE __m512i lift(__m512i exp_avg, __m512i random, float smallest)
{
    const __mmask16 is_lifted = _mm512_cmp_ps_mask(
        _mm512_cvtepi32_ps(random) * smallest, _mm512_abs_ps((__m512)exp_avg), _CMP_LT_OQ);
    return _mm512_maskz_set1_epi32(is_lifted, 16 << 16);
}

NOINLINE __m512i lifted_first(__m512i size, Pair exp_avg, uint32_t exponent, uint32_t key,
                              const Pair *draws, const Order *order)
{
    const Pair random = drawn(key, draws, 32 - BITS);
    const float smallest = as_float((8 * exponent + 1) << BITS) * (1.0f / (1 << BITS));
    const Pair lifted = {lift(exp_avg.a, random.a, smallest), lift(exp_avg.b, random.b, smallest)};
    return _mm512_max_epu16(size, words_of(lifted, order->higher));
}

/* With random bits, no number but 0 has a word below 0x80. */
INLINE __m512i lifted_second(__m512i size, __m512i word)
{
    const __mmask32 some = _mm512_cmpge_epu16_mask(word, every(0x80));
    return _mm512_mask_max_epu16(size, some, size, every(16));
}

/* Writes a group's exponent byte, from the inverse of its largest word; returns what is taken from
 * all words of the group. */
INLINE __m512i put_exponent(__m128i inverse, __m128i room, uint8_t *byte)
{
    const __m128i largest = _mm_xor_si128(inverse, _mm_set1_epi16(-1));
    const __m128i exponent = _mm_subs_epu16(_mm_srli_epi16(largest, 7), room);
    *byte = (uint8_t)_mm_extract_epi8(exponent, 0);
    return _mm512_broadcastw_epi16(_mm_slli_epi16(exponent, 7));
}

#endif
