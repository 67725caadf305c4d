/* AdamW (Loshchilov and Hutter 2019) in one pass over memory: every operand is read once and written once.

   The order of operations and the two fused multiply-adds are those of torch's fused CPU kernel as its builds have it,
   so the results are equal bit for bit; the compiler must contract no other operations. Cores take blocks one by one,
   because in a loop cut into equal shares a core that another thread needs for a while would delay the others. Operands
   are prefetched tile by tile: four streams at once are more than a core's own prefetchers keep filled. A bf16 weight
   is only written: stored past the caches, whole lines at a time, it need not be read first. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK 65536
#define TILE 32
/* Elements between use and prefetch. A prefetch past the end of a tensor is harmless. */
#define AHEAD 256
#define CACHE_LINE 64

#define PREFETCH(POINTER)                                                                                             \
  for (uint64_t byte = 0; byte < TILE * sizeof *(POINTER); byte += CACHE_LINE)                                        \
    __builtin_prefetch((const char *)((POINTER) + AHEAD) + byte)

typedef uint16_t bf16;

static inline float load_fp32(float value) { return value; }

static inline float load_bf16(bf16 value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

static inline float store_fp32(float value) { return value; }

/* Rounds to the nearest, ties to even; a NaN stays a NaN. */
static inline bf16 store_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return value != value ? 0x7fc0 : (bf16)rounded;
}

/* Stores one tile of bf16 weights, which is one line of the cache, past the caches. */
static inline void store_past_caches(void *line, const void *from) {
#ifdef __SSE2__
  for (int part = 0; part < 4; part++) _mm_stream_si128((__m128i *)line + part, _mm_load_si128((__m128i *)from + part));
#else
  memcpy(line, from, CACHE_LINE);
#endif
}

/* To be called before other threads, or a device, read memory that was stored past the caches. */
static inline void finish_stores(void) {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

#define float_load load_fp32
#define float_store store_fp32
#define bf16_load load_bf16
#define bf16_store store_bf16

/* `lerp` is 1 - beta1. From 0.5 up torch interpolates from the gradient's end; `towards` is then `lerp` - 1. */
#define ELEMENTS(WEIGHT, GRADIENT, MOMENT, WEIGHTS, FROM, TO)                                                         \
  _Pragma("omp simd") for (int64_t i = FROM; i < TO; i++) {                                                           \
    float g = GRADIENT##_load(gradient[i]) * scale;                                                                   \
    float m = MOMENT##_load(exp_avg[i]);                                                                              \
    float v = MOMENT##_load(exp_avg_sq[i]);                                                                           \
    m = fmaf(towards, g - m, lerp < 0.5f ? m : g);                                                                    \
    v = fmaf(rest2 * g, g, v * beta2);                                                                                \
    float value = master[i] * decay + -step_size * m / (sqrtf(v) / correction + eps);                                 \
    exp_avg[i] = MOMENT##_store(m);                                                                                   \
    exp_avg_sq[i] = MOMENT##_store(v);                                                                                \
    master[i] = value;                                                                                                \
    (WEIGHTS)[i - (FROM)] = WEIGHT##_store(value);                                                                    \
  }

/* A float32 weight is its own master: both point to the same memory. */
#define ADAMW(NAME, WEIGHT, GRADIENT, MOMENT)                                                                         \
  void NAME(int64_t count, int threads, void *weights, const void *gradients, float *masters, void *exp_avgs,         \
            void *exp_avg_sqs, float scale, float decay, float lerp, float beta2, float rest2, float correction,      \
            float eps, float step_size) {                                                                             \
    int64_t blocks = (count + BLOCK - 1) / BLOCK;                                                                     \
    float towards = lerp < 0.5f ? lerp : lerp - 1.0f;                                                                 \
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic) if (blocks > 1)")                                \
    for (int64_t b = 0; b < blocks; b++) {                                                                            \
      int64_t start = b * BLOCK;                                                                                      \
      int64_t length = count - start < BLOCK ? count - start : BLOCK;                                                 \
      int64_t whole = length - length % TILE;                                                                         \
      WEIGHT *weight = (WEIGHT *)weights + start;                                                                     \
      const GRADIENT *gradient = (const GRADIENT *)gradients + start;                                                 \
      float *master = masters + start;                                                                                \
      MOMENT *exp_avg = (MOMENT *)exp_avgs + start;                                                                   \
      MOMENT *exp_avg_sq = (MOMENT *)exp_avg_sqs + start;                                                             \
      int past_caches = sizeof *weight == sizeof(bf16) && (uintptr_t)weight % CACHE_LINE == 0;                        \
      for (int64_t tile = 0; tile < whole; tile += TILE) {                                                            \
        PREFETCH(gradient + tile);                                                                                    \
        PREFETCH(master + tile);                                                                                      \
        PREFETCH(exp_avg + tile);                                                                                     \
        PREFETCH(exp_avg_sq + tile);                                                                                  \
        WEIGHT line[TILE] __attribute__((aligned(CACHE_LINE)));                                                       \
        ELEMENTS(WEIGHT, GRADIENT, MOMENT, past_caches ? line : weight + tile, tile, tile + TILE)                     \
        if (past_caches) store_past_caches(weight + tile, line);                                                      \
      }                                                                                                               \
      ELEMENTS(WEIGHT, GRADIENT, MOMENT, weight + whole, whole, length)                                               \
      finish_stores();                                                                                                \
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
