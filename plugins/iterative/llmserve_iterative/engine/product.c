/* Products with a weight in bfloat16, for processors that multiply pairs of them.
 *
 * A weight [outputs, inputs] lies in panels of sixteen outputs, each with pairs of inputs one
 * behind the other: one vector holds a pair for every output of the panel, so that few rows are
 * multiplied as fast as the weight can be read, and many from what the cache still holds of it.
 */
#include <stdint.h>
#include <string.h>

#define LANES 16
#define ROWS 6
#define PANELS 4
#define INLINE static inline __attribute__((always_inline))

#ifdef __AVX512BF16__
#include <immintrin.h>

int can_multiply(void) { return 1; }

void pack(const uint16_t *weight, int64_t outputs, int64_t inputs, uint16_t *packed) {
    int64_t pairs = inputs / 2;
#pragma omp parallel for
    for (int64_t panel = 0; panel < (outputs + LANES - 1) / LANES; panel++)
        for (int64_t pair = 0; pair < pairs; pair++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                int64_t output = panel * LANES + lane;
                uint16_t *to = packed + ((panel * pairs + pair) * LANES + lane) * 2;
                if (output < outputs)
                    memcpy(to, weight + output * inputs + 2 * pair, 4);
                else
                    memset(to, 0, 4);
            }
}

/* A block of the product; rows and panels are known when this is compiled. */
INLINE void block(const uint16_t *x, int64_t inputs, const uint16_t *packed, const uint16_t *bias,
                  uint16_t *out, int64_t outputs, int64_t first, const int rows,
                  const int panels) {
    __m512 sums[ROWS][PANELS];
    int64_t pairs = inputs / 2;
    for (int row = 0; row < rows; row++)
        for (int panel = 0; panel < panels; panel++)
            sums[row][panel] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
        __m512bh weights[PANELS];
        for (int panel = 0; panel < panels; panel++) {
            const uint16_t *from = packed + (panel * pairs + pair) * 2 * LANES;
            _mm_prefetch((const char *)from + 1024, _MM_HINT_T0);
            weights[panel] = (__m512bh)_mm512_loadu_si512(from);
        }
        for (int row = 0; row < rows; row++) {
            int32_t both;
            memcpy(&both, x + row * inputs + 2 * pair, 4);
            __m512bh spread = (__m512bh)_mm512_set1_epi32(both);
            for (int panel = 0; panel < panels; panel++)
                sums[row][panel] = _mm512_dpbf16_ps(sums[row][panel], spread, weights[panel]);
        }
    }
    for (int panel = 0; panel < panels; panel++) {
        int64_t left = outputs - first - panel * LANES;
        __mmask16 mask = left >= LANES ? 0xffff : (__mmask16)((1 << left) - 1);
        __m512 added = _mm512_setzero_ps();
        if (bias) {
            __m256i raw = _mm256_maskz_loadu_epi16(mask, bias + first + panel * LANES);
            added = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
        }
        for (int row = 0; row < rows; row++) {
            __m256bh value = _mm512_cvtneps_pbh(_mm512_add_ps(sums[row][panel], added));
            _mm256_mask_storeu_epi16(out + row * outputs + first + panel * LANES, mask,
                                     (__m256i)value);
        }
    }
}

INLINE void stripe(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed,
                   const uint16_t *bias, uint16_t *out, int64_t outputs, int64_t first,
                   const int panels) {
    /* Blocks of about the same height: none is left with a single row. */
    int64_t blocks = (rows + ROWS - 1) / ROWS;
    for (int64_t number = 0; number < blocks; number++) {
        int64_t from = rows * number / blocks, height = rows * (number + 1) / blocks - from;
        const uint16_t *in = x + from * inputs;
        uint16_t *to = out + from * outputs;
        switch (height) {
        case 1: block(in, inputs, packed, bias, to, outputs, first, 1, panels); break;
        case 2: block(in, inputs, packed, bias, to, outputs, first, 2, panels); break;
        case 3: block(in, inputs, packed, bias, to, outputs, first, 3, panels); break;
        case 4: block(in, inputs, packed, bias, to, outputs, first, 4, panels); break;
        case 5: block(in, inputs, packed, bias, to, outputs, first, 5, panels); break;
        default: block(in, inputs, packed, bias, to, outputs, first, 6, panels);
        }
    }
}

/* out = x weight^T + bias, for x [rows, inputs]; the inputs are an even number. */
void multiply(const uint16_t *x, int64_t rows, int64_t inputs, const uint16_t *packed,
              const uint16_t *bias, uint16_t *out, int64_t outputs) {
    int64_t panels = (outputs + LANES - 1) / LANES, stripes = (panels + PANELS - 1) / PANELS;
#pragma omp parallel for schedule(static)
    for (int64_t number = 0; number < stripes; number++) {
        int64_t panel = number * PANELS;
        const uint16_t *from = packed + panel * inputs * LANES;
        int64_t first = panel * LANES;
        if (panel + PANELS <= panels)
            stripe(x, rows, inputs, from, bias, out, outputs, first, PANELS);
        else
            for (; panel < panels; panel++)
                stripe(x, rows, inputs, packed + panel * inputs * LANES, bias, out, outputs,
                       panel * LANES, 1);
    }
}

#else

int can_multiply(void) { return 0; }

#endif
