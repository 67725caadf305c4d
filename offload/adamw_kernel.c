/* AdamW (Loshchilov and Hutter 2019) in one pass over memory: every operand is read once and written once.

   The order of operations and the two fused multiply-adds are those of torch's fused CPU kernel as its builds have it,
   so that its results are met bit for bit; the compiler must contract no other. Work is dealt out in blocks, because
   a core that another thread needs for a while would hold up a loop cut into equal shares. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 65536

typedef uint16_t bf16;

static inline float load_fp32(float value) { return value; }

static inline float load_bf16(bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

static inline float store_fp32(float value) { return value; }

/* To the nearest, ties to even; a NaN stays one. */
static inline bf16 store_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value != value ? 0x7fc0 : (bf16)rounded;
}

#define float_load load_fp32
#define float_store store_fp32
#define bf16_load load_bf16
#define bf16_store store_bf16

/* `lerp` is 1 - beta1; from 0.5 up torch interpolates from the gradient's end, with `lerp` - 1. A float32 weight is
   its own master: both point to the same memory. */
#define ADAMW(NAME, WEIGHT, GRADIENT, MOMENT)                                                                         \
  void NAME(int64_t count, int threads, void *weights, const void *gradients, float *masters, void *exp_avgs,         \
            void *exp_avg_sqs, float scale, float decay, float lerp, float beta2, float rest2, float correction,      \
            float eps, float step_size) {                                                                             \
    int64_t blocks = (count + BLOCK - 1) / BLOCK;                                                                     \
    float towards = lerp < 0.5f ? lerp : lerp - 1.0f;                                                                 \
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic)") for (int64_t b = 0; b < blocks; b++) {         \
      int64_t start = b * BLOCK;                                                                                      \
      int64_t length = count - start < BLOCK ? count - start : BLOCK;                                                 \
      WEIGHT *weight = (WEIGHT *)weights + start;                                                                     \
      const GRADIENT *gradient = (const GRADIENT *)gradients + start;                                                 \
      float *master = masters + start;                                                                                \
      MOMENT *exp_avg = (MOMENT *)exp_avgs + start;                                                                   \
      MOMENT *exp_avg_sq = (MOMENT *)exp_avg_sqs + start;                                                             \
      _Pragma("omp simd") for (int64_t i = 0; i < length; i++) {                                                      \
        float g = GRADIENT##_load(gradient[i]) * scale;                                                               \
        float m = MOMENT##_load(exp_avg[i]);                                                                          \
        float v = MOMENT##_load(exp_avg_sq[i]);                                                                       \
        m = fmaf(towards, g - m, lerp < 0.5f ? m : g);                                                                \
        v = fmaf(rest2 * g, g, v * beta2);                                                                                \
        float value = master[i] * decay + -step_size * m / (sqrtf(v) / correction + eps);                             \
        exp_avg[i] = MOMENT##_store(m);                                                                               \
        exp_avg_sq[i] = MOMENT##_store(v);                                                                            \
        master[i] = value;                                                                                            \
        weight[i] = WEIGHT##_store(value);                                                                            \
      }                                                                                                               \
    }                                                                                                                 \
  }

/* Named after the dtypes of weight, gradient and moments. */
ADAMW(adamw_bfloat16_bfloat16_float32, bf16, bf16, float)
ADAMW(adamw_bfloat16_bfloat16_bfloat16, bf16, bf16, bf16)
ADAMW(adamw_bfloat16_float32_float32, bf16, float, float)
ADAMW(adamw_bfloat16_float32_bfloat16, bf16, float, bf16)
ADAMW(adamw_float32_bfloat16_float32, float, bf16, float)
ADAMW(adamw_float32_bfloat16_bfloat16, float, bf16, bf16)
ADAMW(adamw_float32_float32_float32, float, float, float)
ADAMW(adamw_float32_float32_bfloat16, float, float, bf16)
