/* AdamW in one pass over memory: every operand is read once and written once.

   Cores take blocks one by one, because in a loop cut into equal shares a core that another thread needs for a while
   would delay the others. Operands are prefetched tile by tile: several streams at once are more than a core's own
   prefetchers keep filled. */

#include "adamw_formats.h"

#define ELEMENTS(KIND, GRADIENT, FROM, TO)                                                                            \
  {                                                                                                                   \
    uint32_t exp_avg_largest = 0, exp_avg_sq_largest = 0;                                                             \
    OF(MOMENT, BEGIN)(FROM, TO)                                                                                       \
    _Pragma("omp simd reduction(max : exp_avg_largest, exp_avg_sq_largest)")                                          \
    for (int64_t i = FROM; i < TO; i++) {                                                                             \
      float g = load_##GRADIENT(gradient[i]) * scale;                                                                 \
      float m = OF(MOMENT, GET)(exp_avg, i, FROM);                                                                    \
      float v = OF(MOMENT, GET)(exp_avg_sq, i, FROM);                                                                 \
      m = next_exp_avg(g, m, lerp, towards);                                                                          \
      v = next_exp_avg_sq(g, v, beta2, rest2);                                                                        \
      float value = OF(KIND, READ)(i) * decay + change_of(m, v, correction, eps, step_size);                          \
      OF(MOMENT, SET)(exp_avg, i, FROM, m);                                                                           \
      OF(MOMENT, SET)(exp_avg_sq, i, FROM, v);                                                                        \
      OF(KIND, WRITE)(i, value);                                                                                      \
    }                                                                                                                 \
    OF(MOMENT, END)(FROM, TO)                                                                                         \
  }

/* `first` is the place of the range's first element in its parameter, for the noise. Scales are NULL without codes, and
   rests without masters beside the weight. */
#define ADAMW(NAME, KIND, WEIGHT, GRADIENT)                                                                           \
  void NAME(int64_t count, int64_t first_element, int threads, uint32_t key, void *weights, const void *gradients,    \
            void *rests, void *exp_avgs, void *exp_avg_sqs, float *exp_avg_scales, float *exp_avg_sq_scales,          \
            float scale, float decay, float lerp, float beta2, float rest2, float correction, float eps,              \
            float step_size) {                                                                                        \
    (void)key;                                                                                                        \
    int64_t blocks = (count + BLOCK - 1) / BLOCK;                                                                     \
    float towards = lerp < 0.5f ? lerp : lerp - 1.0f;                                                                 \
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic) if (blocks > 1)")                                \
    for (int64_t b = 0; b < blocks; b++) {                                                                            \
      int64_t start = b * BLOCK;                                                                                      \
      int64_t length = count - start < BLOCK ? count - start : BLOCK;                                                 \
      int64_t whole = length - length % TILE;                                                                         \
      uint32_t first __attribute__((unused)) = (uint32_t)(first_element + start);                                     \
      WEIGHT *weight = (WEIGHT *)weights + start;                                                                     \
      const GRADIENT *gradient = (const GRADIENT *)gradients + start;                                                 \
      OF(KIND, rest) *rest __attribute__((unused)) = (OF(KIND, rest) *)rests + (OF(KIND, HAS_REST) ? start : 0);      \
      OF(MOMENT, moment) *exp_avg = (OF(MOMENT, moment) *)exp_avgs + start;                                           \
      OF(MOMENT, moment) *exp_avg_sq = (OF(MOMENT, moment) *)exp_avg_sqs + start;                                     \
      float *exp_avg_scale __attribute__((unused)) = exp_avg_scales + (QUANTISED ? start / TILE : 0);                 \
      float *exp_avg_sq_scale __attribute__((unused)) = exp_avg_sq_scales + (QUANTISED ? start / TILE : 0);           \
      for (int64_t tile = 0; tile < whole; tile += TILE) {                                                            \
        PREFETCH_TILE(KIND, tile);                                                                                    \
        ELEMENTS(KIND, GRADIENT, tile, tile + TILE)                                                                   \
      }                                                                                                               \
      if (whole < length) ELEMENTS(KIND, GRADIENT, whole, length)                                                     \
    }                                                                                                                 \
  }

/* Named after the dtypes of weight and gradient. */
ADAMW(adamw_bfloat16_bfloat16, MASTER, bf16, bf16)
ADAMW(adamw_bfloat16_float32, MASTER, bf16, float)
ADAMW(adamw_float32_bfloat16, own, float, bf16)
ADAMW(adamw_float32_float32, own, float, float)
