/* Whole groups of compact state by AVX-512, in registers from codes to codes. The results are
 * those of _host_compact.c, which does all other groups.
 */
#include "_host_compact.h"

#if defined(HAS_CLONES)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#pragma GCC optimize("no-tree-slp-vectorize") /* it packs single keys by slow inserts */
#include "_host_compact_words.h"

/* Elements from a group to the one that is fetched meanwhile. */
enum { AHEAD = 8 * GROUP };

/* 32 elements; the last step's root and displacement. In factored state there are no second moments
 * and no roots: each function is told by `factored`, which the compiler knows. */
typedef struct {
    Pair master, exp_avg, exp_avg_sq;
    Pair root, delta;
} Half;

/* scale * grad */
INLINE Pair gradient(const RowPass *pass, const AdamStep *step, int dtype, int64_t at,
                     const Order *order)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at;
    float factor = step->scale;
    Pair pair;
    if (dtype == BFLOAT16) {
        pair = unpacked(_mm512_loadu_si512((const uint16_t *)step->grad + start),
                        _mm512_setzero_si512());
    } else if (dtype == E4M3) {
        const uint8_t *codes = row_of(step->grad, job->cols, pass->row);
        const uint32_t exponent = codes[job->cols + at / GROUP];
        factor = exponent == NOT_FINITE ? as_float(0x7fc00000u) : factor;
        pair = decoded_signed(codes + at, base_of(exponent), order);
    } else {
        float tile[HALF];
        scale_into(tile, step->grad, dtype, start, HALF, factor, 0);
        return numbers_at(tile, order);
    }
    if (factor != 1.0f) {
        pair.a = (__m512i)((__m512)pair.a * factor);
        pair.b = (__m512i)((__m512)pair.b * factor);
    }
    return pair;
}

INLINE __m512i root_of(__m512i exp_avg_sq)
{
    return (__m512i)_mm512_sqrt_ps((__m512)exp_avg_sq);
}

INLINE __m512i displacement(float eps, const Scales *scales, __m512i exp_avg, __m512i root)
{
    return (__m512i)(scales->step_size * (__m512)exp_avg /
                     ((__m512)root * scales->inverse_denom_scale + eps));
}

/* 1 - beta1 is below 0.5. */
INLINE __m512i next_first(const Scales *scales, __m512i old, __m512i g)
{
    return (__m512i)((__m512)old + ((__m512)g - (__m512)old) * scales->one_minus_beta1);
}

INLINE __m512i next_second(const Scales *scales, __m512i old, __m512i g)
{
    return (__m512i)((__m512)old * scales->beta2 +
                     scales->one_minus_beta2 * (__m512)g * (__m512)g);
}

INLINE Pair divided_displacement(const Scales *scales, const Half *half)
{
    const Pair delta = {(__m512i)(scales->step_size * (__m512)half->exp_avg.a),
                        (__m512i)(scales->step_size * (__m512)half->exp_avg.b)};
    return delta;
}

/* The first part of step_tile. */
INLINE void step_moments(const Scales *scales, Pair grad, Half *half, int factored)
{
    half->exp_avg.a = next_first(scales, half->exp_avg.a, grad.a);
    half->exp_avg.b = next_first(scales, half->exp_avg.b, grad.b);
    if (factored)
        return;
    half->exp_avg_sq.a = next_second(scales, half->exp_avg_sq.a, grad.a);
    half->exp_avg_sq.b = next_second(scales, half->exp_avg_sq.b, grad.b);
    half->root.a = root_of(half->exp_avg_sq.a);
    half->root.b = root_of(half->exp_avg_sq.b);
}

/* Its second part. */
INLINE void step_weights(const AdamStep *step, const Scales *scales, Half *half, int factored)
{
    if (factored) {
        half->delta = divided_displacement(scales, half);
    } else {
        half->delta.a = displacement(step->eps, scales, half->exp_avg.a, half->root.a);
        half->delta.b = displacement(step->eps, scales, half->exp_avg.b, half->root.b);
    }
    half->master.a = (__m512i)((__m512)half->master.a * step->decay - (__m512)half->delta.a);
    half->master.b = (__m512i)((__m512)half->master.b * step->decay - (__m512)half->delta.b);
}

/* An upload's weights: moved on by the displacement, if there is a lead. */
INLINE Pair led(const RowUpload *upload, const Half *half, int is_known, int factored)
{
    Pair values = half->master, delta = half->delta;
    if (!upload->scales)
        return values;
    if (!is_known && factored) {
        delta = divided_displacement(upload->scales, half);
    } else if (!is_known) {
        const float eps = upload->job->upload.eps;
        delta.a = displacement(eps, upload->scales, half->exp_avg.a, root_of(half->exp_avg_sq.a));
        delta.b = displacement(eps, upload->scales, half->exp_avg.b, root_of(half->exp_avg_sq.b));
    }
    values.a = (__m512i)((__m512)values.a - upload->job->lead * (__m512)delta.a);
    values.b = (__m512i)((__m512)values.b - upload->job->lead * (__m512)delta.b);
    return values;
}

INLINE __m512i half_words(Pair values, int dtype, const Order *order)
{
    if (dtype == BFLOAT16)
        return to_bfloat16_words(values, order);
    float tile[HALF];
    uint16_t words[HALF];
    put_numbers(tile, values, order);
    store_cast(words, FLOAT16, 0, HALF, tile);
    return _mm512_loadu_si512(words);
}

/* Words of a repeatable upload: their zeros have no sign. */
INLINE __m512i repeatable_words(Pair values, int dtype, const Order *order)
{
    const __m512i words = half_words(values, dtype, order);
    const __mmask32 others = _mm512_cmpneq_epi16_mask(words, every((int16_t)0x8000));
    return _mm512_maskz_mov_epi16(others, words);
}

INLINE void put_upload(const HostJob *job, int64_t start, Pair values, const Order *order)
{
    if (job->out_dtype == FLOAT32)
        put_numbers((float *)job->out + start, values, order);
    else
        _mm512_storeu_si512((uint16_t *)job->out + start,
                            half_words(values, job->out_dtype, order));
}

INLINE __m512i larger_size(__m512i one, __m512i other)
{
    return (__m512i)_mm512_range_ps((__m512)one, (__m512)other, 0xb);
}

INLINE __m512i largest_bits(const Pair *one, const Pair *two)
{
    return _mm512_max_epu32(_mm512_max_epu32(one->a, one->b), _mm512_max_epu32(two->a, two->b));
}

INLINE Pair without_sign(Pair values)
{
    const Pair sizes = {(__m512i)_mm512_abs_ps((__m512)values.a),
                        (__m512i)_mm512_abs_ps((__m512)values.b)};
    return sizes;
}

/* Largest words of both moments, inverted, in quarters 0 and 2. A NaN among first moments shows in
 * the second ones alone, as larger_size passes it over; in factored state these are the sizes of
 * the first. */
INLINE __m512i largest_of(const Half *one, const Half *two, const Order *order, int factored)
{
    const Pair second1 = factored ? without_sign(one->exp_avg) : one->exp_avg_sq;
    const Pair second2 = factored ? without_sign(two->exp_avg) : two->exp_avg_sq;
    const Pair both = {larger_size(larger_size(one->exp_avg.a, one->exp_avg.b),
                                   larger_size(two->exp_avg.a, two->exp_avg.b)),
                       largest_bits(&second1, &second2)};
    const __m512i eighth = words_of(both, order->highest);
    const __m512i quarter = _mm512_max_epu16(eighth, _mm512_shuffle_i64x2(eighth, eighth, 0xb1));
    return _mm512_xor_si512(quarter, every(-1));
}

/* Keys of a group's first element. */
INLINE Keys keys_at(const RowPass *pass, int64_t at)
{
    const Keys keys = {pass->keys.weight + (uint32_t)at * ODD_WEIGHT,
                       pass->keys.first + (uint32_t)at * ODD_FIRST,
                       pass->keys.second + (uint32_t)at * ODD_SECOND};
    return keys;
}

/* Moments of a half that become codes. */
typedef struct {
    __m512i word1, word2, size1, size2;
} Coded;

INLINE Coded begin_codes(const Keys *keys, int which, const Half *half, const Order *order,
                         int factored)
{
    Coded own;
    own.word1 = rounded(half->exp_avg, keys->first, &order->draws[1][which], order);
    if (!factored)
        own.word2 = rounded(half->exp_avg_sq, keys->second, &order->draws[2][which], order);
    return own;
}

INLINE __m512i set_sizes(Coded *own, __m512i base1, __m512i base2, const Order *order,
                         int factored)
{
    own->size1 = _mm512_subs_epu16(_mm512_and_si512(own->word1, order->size), base1);
    if (factored)
        return own->size1;
    own->size2 = _mm512_subs_epu16(own->word2, base2);
    return _mm512_min_epu16(own->size1, own->size2);
}

INLINE void lift_codes(Coded *own, Pair exp_avg, uint32_t exponent, uint32_t key, int which,
                       const Order *order, int factored)
{
    own->size1 =
        lifted_first(own->size1, exp_avg, exponent, key, &order->draws[1][which], order);
    if (!factored)
        own->size2 = lifted_second(own->size2, own->word2);
}

INLINE __m512i first_bytes(const Coded *own, const Order *order)
{
    return _mm512_ternarylogic_epi32(/* the sign where the mask has a bit */
                                     order->sign8, _mm512_srli_epi16(own->word1, 8),
                                     _mm512_srli_epi16(own->size1, 4), 0xca);
}

INLINE void put_weights(const HostJob *job, int64_t start, uint32_t key, const Half *one,
                        const Half *two, const Order *order)
{
    uint16_t *high = job->high + start;
    const Pair *draws = order->draws[0];
    const __m512i low1 = encode_weights(one->master, key, &draws[0], order, high);
    const __m512i low2 = encode_weights(two->master, key, &draws[1], order, high + HALF);
    put_bytes(job->low + start, low1, low2, order);
}

/* An upload's weights; `former` are the words of the upload before, where there are marks. */
INLINE void upload_half(const RowPass *pass, int64_t at, const Half *half, __m512i former,
                        const Order *order, int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at;
    if (!job->repeatable) {
        put_upload(job, start, led(&pass->upload, half, repeats_last(pass), factored), order);
        return;
    }
    const Pair values = led(&pass->upload, half, 0, factored);
    const __m512i words = repeatable_words(values, job->out_dtype, order);
    if (job->marks) {
        const uint32_t marks = _mm512_cmpneq_epi16_mask(words, former);
        memcpy(job->marks + pass->row * mark_bytes(job->cols) + at / 8, &marks, sizeof marks);
    }
    _mm512_storeu_si512((uint16_t *)job->out + start, words);
}

/* A step on both halves, up to the roots, and from there. */
INLINE void begin_step(const RowPass *pass, int64_t k, int64_t at, int dtype, const Order *order,
                       Half *one, Half *two, int factored)
{
    const AdamStep *step = &pass->job->steps[k];
    step_moments(&pass->scales[k], gradient(pass, step, dtype, at, order), one, factored);
    step_moments(&pass->scales[k], gradient(pass, step, dtype, at + HALF, order), two, factored);
}

INLINE void end_step(const RowPass *pass, int64_t k, Half *one, Half *two, int factored)
{
    step_weights(&pass->job->steps[k], &pass->scales[k], one, factored);
    step_weights(&pass->job->steps[k], &pass->scales[k], two, factored);
}

INLINE void decode_weights(const RowPass *pass, int64_t at, Half *one, Half *two)
{
    const int64_t start = pass->row * pass->job->cols + at;
    one->master = decoded_weights(pass->job, start);
    two->master = decoded_weights(pass->job, start + HALF);
}

INLINE void decode_moments(const RowPass *pass, int64_t at, const Order *order, Half *one,
                           Half *two, int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at, place = place_of(pass, at);
    const __m512i base1 = base_of(job->exponents1[place]);
    one->exp_avg = decoded_signed(job->exp_avg8 + start, base1, order);
    two->exp_avg = decoded_signed(job->exp_avg8 + start + HALF, base1, order);
    if (factored)
        return;
    const __m512i base2 = base_of(job->exponents2[place]);
    one->exp_avg_sq = decoded_second(job->exp_avg_sq8 + start, base2);
    two->exp_avg_sq = decoded_second(job->exp_avg_sq8 + start + HALF, base2);
}

/* The last step's end, and the codes. Returns 0, with nothing written, if a moment is not
 * finite. */
INLINE int encode(const RowPass *pass, int64_t at, const Order *order, Half *one, Half *two,
                  int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at, place = place_of(pass, at);
    uint8_t unused;
    const __m512i largest = largest_of(one, two, order, factored);
    if (__builtin_expect(_mm512_cmple_epu16_mask(largest, order->finite) != 0, 0))
        return 0;
    const __m128i first = _mm_minpos_epu16(_mm512_castsi512_si128(largest));
    const __m128i second = _mm_minpos_epu16(_mm512_extracti32x4_epi32(largest, 2));
    const __m512i base1 = put_exponent(first, order->first, &job->exponents1[place]);
    const __m512i base2 =
        put_exponent(second, order->second, factored ? &unused : &job->exponents2[place]);
    const Keys keys = keys_at(pass, at);
    Coded codes1 = begin_codes(&keys, 0, one, order, factored);
    Coded codes2 = begin_codes(&keys, 1, two, order, factored);
    end_step(pass, pass->num_steps - 1, one, two, factored);
    const __m512i least = _mm512_min_epu16(set_sizes(&codes1, base1, base2, order, factored),
                                           set_sizes(&codes2, base1, base2, order, factored));
    if (__builtin_expect(_mm512_cmplt_epu16_mask(least, order->one) != 0, 0)) {
        const uint32_t exponent = job->exponents1[place];
        lift_codes(&codes1, one->exp_avg, exponent, keys.first, 0, order, factored);
        lift_codes(&codes2, two->exp_avg, exponent, keys.first, 1, order, factored);
    }
    put_bytes(job->exp_avg8 + start, first_bytes(&codes1, order), first_bytes(&codes2, order),
              order);
    if (!factored)
        put_bytes(job->exp_avg_sq8 + start, _mm512_srli_epi16(codes1.size2, 4),
                  _mm512_srli_epi16(codes2.size2, 4), order);
    put_weights(job, start, keys.weight, one, two, order);
    return 1;
}

/* Returns 0, with nothing written, for a group with infinities or NaN: its codes may wrap
 * around. */
INLINE int catch_up_group(const RowPass *pass, int64_t at, int dtype, const Order *order,
                          int factored)
{
    const HostJob *job = pass->job;
    const int64_t place = place_of(pass, at);
    __m512i former1 = _mm512_setzero_si512(), former2 = former1;
    Half one = {0}, two = {0};
    if (job->exponents1[place] >= NO_NUMBER - ROOM_FIRST ||
        (!factored && job->exponents2[place] >= NO_NUMBER - ROOM_SECOND))
        return 0;
    decode_moments(pass, at, order, &one, &two, factored);
    if (job->marks) {
        decode_weights(pass, at, &one, &two);
        const Pair before1 = led(&pass->former, &one, 0, factored);
        const Pair before2 = led(&pass->former, &two, 0, factored);
        former1 = repeatable_words(before1, job->out_dtype, order);
        former2 = repeatable_words(before2, job->out_dtype, order);
    }
    if (pass->num_steps)
        begin_step(pass, 0, at, dtype, order, &one, &two, factored);
    decode_weights(pass, at, &one, &two); /* while roots are taken */
    for (int64_t k = 1; k < pass->num_steps; k++) {
        end_step(pass, k - 1, &one, &two, factored);
        begin_step(pass, k, at, dtype, order, &one, &two, factored);
    }
    if (pass->num_steps) {
        if (!encode(pass, at, order, &one, &two, factored))
            return 0;
        if (job->repeatable) {
            decode_moments(pass, at, order, &one, &two, factored);
            decode_weights(pass, at, &one, &two);
        }
    }
    if (job->out) {
        upload_half(pass, at, &one, former1, order, factored);
        upload_half(pass, at + HALF, &two, former2, order, factored);
    }
    return 1;
}

/* Asks for a later group's codes and first gradient: a group is a line or two of each array, which
 * the hardware does not see coming in time. */
INLINE void fetch_ahead(const RowPass *pass, int64_t at, int dtype, int factored)
{
    const HostJob *job = pass->job;
    const int64_t start = pass->row * job->cols + at + AHEAD;
    __builtin_prefetch(job->high + start, 1);
    __builtin_prefetch(job->high + start + HALF, 1);
    __builtin_prefetch(job->low + start, 1);
    __builtin_prefetch(job->exp_avg8 + start, 1);
    if (!factored)
        __builtin_prefetch(job->exp_avg_sq8 + start, 1);
    if (pass->num_steps && dtype == BFLOAT16) {
        const uint16_t *grad = (const uint16_t *)job->steps[0].grad + start;
        __builtin_prefetch(grad, 0);
        __builtin_prefetch(grad + HALF, 0);
    }
}

INLINE void catch_up(const RowPass *pass, int dtype, int factored)
{
    /* Copies, which no store of bytes can change. */
    const HostJob job = *pass->job, former = *pass->former.job;
    RowPass own = *pass;
    const int64_t end = job.cols / GROUP * GROUP;
    Order order;
    own.job = own.upload.job = &job;
    own.former.job = &former;
    fill_order(&order);
    for (int64_t at = 0; at < end; at += GROUP) {
        fetch_ahead(&own, at, dtype, factored);
        if (!catch_up_group(&own, at, dtype, &order, factored))
            zenflow_compact_part(pass, at, at + GROUP);
    }
}

/* Functions of their own: in one, the compiler would find fewer registers for each. */
NOINLINE void catch_up_factored(const RowPass *pass, int dtype)
{
    catch_up(pass, dtype, 1);
}

int64_t zenflow_compact_wide(const RowPass *pass)
{
    /* Other averages begin from the gradient, or say nothing of the first moment's size. */
    for (int64_t k = 0; k < pass->num_steps; k++)
        if (!(pass->scales[k].one_minus_beta1 < 0.5f && pass->scales[k].one_minus_beta2 > 0.0f))
            return 0;
    if (pass->job->factored)
        catch_up_factored(pass, pass->job->grad_dtype);
    else if (pass->job->grad_dtype == BFLOAT16)
        catch_up(pass, BFLOAT16, 0);
    else
        catch_up(pass, pass->job->grad_dtype, 0);
    return pass->job->cols / GROUP * GROUP;
}
#endif
