/* Attention of single tokens over a cache, for processors.
 *
 * A layer of the cache is a table of rows, one per head and place: a sequence whose extent
 * begins at place `start` and has `size` places keeps head h's token p in row
 * start * heads + size * h + p. Numbers are float, or bfloat16 as uint16_t where `half` is set;
 * sums are always float. Rows are read once and in order, which is what memory likes.
 * `places` has three rows of so many columns: where each token's sequence starts, its size, and
 * the token's position.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE float one(const void *from, int64_t at, int half) {
    if (!half)
        return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE floats several(const void *from, int64_t at, int half) {
    floats value;
    if (half) {
        halves raw;
        memcpy(&raw, (const uint16_t *)from + at, sizeof raw);
        words bits = __builtin_convertvector(raw, words) << 16;
        memcpy(&value, &bits, sizeof value);
    } else {
        memcpy(&value, (const float *)from + at, sizeof value);
    }
    return value;
}

INLINE void put(void *to, int64_t at, float value, int half) {
    if (half) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        /* To the nearest, and to the even one of two that are as near. */
        ((uint16_t *)to)[at] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    } else {
        ((float *)to)[at] = value;
    }
}

INLINE float sum_of(floats value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += value[lane];
    return sum;
}

/* e to the x, for x <= 0, to within two units of the last place. */
INLINE floats exponential(floats x) {
    /* Below that a float holds nothing; the comparison gives ones or noughts for each lane. */
    floats least = (floats){0} - 87.0f;
    x = (floats)(((ints)x & (x > least)) | ((ints)least & ~(x > least)));
    floats scaled = x * 1.44269504f;
    ints whole = __builtin_convertvector(scaled - 0.5f, ints);
    floats rounded = __builtin_convertvector(whole, floats);
    floats rest = x - rounded * 0.693359375f + rounded * 2.12194440e-4f;
    floats value = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    value = value * rest + 8.3334519073e-3f;
    value = value * rest + 4.1665795894e-2f;
    value = value * rest + 1.6666665459e-1f;
    value = value * rest + 5.0000001201e-1f;
    value = value * rest * rest + rest + 1.0f;
    ints power = (whole + 127) << 23;
    floats scale;
    memcpy(&scale, &power, sizeof scale);
    return value * scale;
}

/* Scores in, weights that sum to one out; the room is filled up to whole vectors. */
INLINE void soft(float *scores, int64_t count) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    float most = -1e30f;
    for (int64_t at = 0; at < count; at++)
        most = scores[at] > most ? scores[at] : most;
    for (int64_t at = count; at < padded; at++)
        scores[at] = -1e30f;
    floats total = {0};
    for (int64_t at = 0; at < padded; at += LANES) {
        floats value = exponential(several(scores, at, 0) - most);
        memcpy(scores + at, &value, sizeof value);
        total += value;
    }
    /* What fills it up is e^-87 each, which is nothing beside the largest's one. */
    float scale = 1.0f / sum_of(total);
    for (int64_t at = 0; at < count; at++)
        scores[at] *= scale;
}

/* The dot products of one query with the rows of a head. */
INLINE void score(const float *query, const void *keys, int64_t row, int64_t count, int64_t width,
                  float scale, float softcap, float *scores, int half) {
    int64_t whole = width / LANES * LANES;
    for (int64_t at = 0; at < count; at++) {
        int64_t begin = (row + at) * width;
        floats sums = {0};
        for (int64_t d = 0; d < whole; d += LANES)
            sums += several(query, d, 0) * several(keys, begin + d, half);
        float sum = sum_of(sums);
        for (int64_t d = whole; d < width; d++)
            sum += query[d] * one(keys, begin + d, half);
        scores[at] = softcap > 0 ? softcap * tanhf(sum * scale / softcap) : sum * scale;
    }
}

/* The weighted sum of a head's rows, four vectors of it at a time. */
INLINE void gather(const float *weights, const void *values, int64_t row, int64_t count,
                   int64_t width, void *out, int64_t to, int half) {
    int64_t d = 0;
    for (; d + 4 * LANES <= width; d += 4 * LANES) {
        floats sums[4] = {{0}, {0}, {0}, {0}};
        for (int64_t at = 0; at < count; at++) {
            int64_t begin = (row + at) * width + d;
            for (int part = 0; part < 4; part++)
                sums[part] += weights[at] * several(values, begin + part * LANES, half);
        }
        for (int part = 0; part < 4; part++)
            for (int lane = 0; lane < LANES; lane++)
                put(out, to + d + part * LANES + lane, sums[part][lane], half);
    }
    for (; d + LANES <= width; d += LANES) {
        floats sums = {0};
        for (int64_t at = 0; at < count; at++)
            sums += weights[at] * several(values, (row + at) * width + d, half);
        for (int lane = 0; lane < LANES; lane++)
            put(out, to + d + lane, sums[lane], half);
    }
    for (; d < width; d++) {
        float sum = 0;
        for (int64_t at = 0; at < count; at++)
            sum += weights[at] * one(values, (row + at) * width + d, half);
        put(out, to + d, sum, half);
    }
}

INLINE void attend_to(const void *queries, int64_t token_step, int64_t head_step, const void *keys,
                      const void *values, void *out, const int64_t *places, int64_t columns,
                      int64_t tokens, int64_t heads, int64_t group, int64_t width, int64_t window, float scale,
                      float softcap, int half) {
    const int64_t *starts = places, *sizes = places + columns, *positions = places + 2 * columns;
    int64_t longest = 0;
    for (int64_t token = 0; token < tokens; token++)
        longest = positions[token] >= longest ? positions[token] + 1 : longest;
#pragma omp parallel
    {
        float *scores = malloc((longest + LANES + width) * sizeof(float));
        float *query = scores + longest + LANES;
#pragma omp for schedule(dynamic, 2)
        for (int64_t item = 0; item < tokens * heads; item++) {
            int64_t token = item / heads, head = item % heads;
            int64_t stop = positions[token] + 1;
            int64_t first = window > 0 && stop > window ? stop - window : 0;
            int64_t row = starts[token] * heads + sizes[token] * head + first;
            for (int64_t member = head * group; member < (head + 1) * group; member++) {
                int64_t from = token * token_step + member * head_step;
                for (int64_t d = 0; d < width; d++)
                    query[d] = one(queries, from + d, half);
                score(query, keys, row, stop - first, width, scale, softcap, scores, half);
                soft(scores, stop - first);
                gather(scores, values, row, stop - first, width, out,
                       (token * heads * group + member) * width, half);
            }
        }
        free(scores);
    }
}

/* The attention of tokens, each the last of its sequence: out is [tokens, heads * group, width]. */
void attend(const void *queries, int64_t token_step, int64_t head_step, const void *keys,
            const void *values, void *out, const int64_t *places, int64_t columns, int64_t tokens,
            int64_t heads, int64_t group, int64_t width, int64_t window, float scale, float softcap, int half) {
    if (half)
        attend_to(queries, token_step, head_step, keys, values, out, places, columns, tokens, heads, group,
                  width, window, scale, softcap, 1);
    else
        attend_to(queries, token_step, head_step, keys, values, out, places, columns, tokens, heads, group,
                  width, window, scale, softcap, 0);
}

/* Copies new rows [heads, tokens, width bytes] to their places. */
void keep(const char *rows, int64_t token_step, int64_t head_step, char *layer,
          const int64_t *places, int64_t columns, int64_t tokens, int64_t heads, int64_t width) {
    const int64_t *starts = places, *sizes = places + columns, *positions = places + 2 * columns;
#pragma omp parallel for collapse(2) if (tokens * heads > 64)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            int64_t row = starts[token] * heads + sizes[token] * head + positions[token];
            memcpy(layer + row * width, rows + token * token_step + head * head_step, width);
        }
}
