/* AdamW that can be undone: the update of adamw_kernel.c with a log, from which `undo` makes the old bits again.

   Both estimate each old number from the new one, by the inverse of the rule in float32, in the same order of
   operations. The log has the difference of their bits, in a signed byte. Elements with a difference that does not fit
   become entries, which have the old bits of all their numbers. So do elements with a NaN, and those whose weight or
   remainder is not what writing their master gives, because somebody else has written it.

   An update stops where the entries of a block are full, and says so; what it has updated can be undone. Compiled for
   one format, as adamw_kernel.c is: compact masters, moments that are fp32 or bf16.

   Codes are narrowed to bytes in loops of their own: a compiler that meets bytes and floats in one loop takes as many
   floats at once as bytes fill a register, and runs out of registers. The codes of a tile fill a cache line in each
   row, which is stored past the caches. */

/* As many elements as a cache line has codes. */
#define TILE 64
#include "adamw_formats.h"
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* Elements for each entry of a block, beside those of a tile. */
#define ENTRIES(LENGTH) (TILE + (LENGTH) / ELEMENTS_FOR_ENTRY)

/* `place` is in the block. The others are bits of the stored numbers. */
typedef struct {
  uint32_t place, weight, rest, exp_avg, exp_avg_sq;
} entry;

/* Of a block: elements that were updated, from its first on, and entries in use. */
typedef struct {
  int32_t updated, entries;
} progress;

/* The stored bits of a moment from its value, and its value from them. */
#define fp32_BITS(value) bits_of(value)
#define fp32_VALUE(bits) float_of(bits)
#define fp32_LOAD(stored) bits_of(stored)
#define fp32_STORE(bits) float_of(bits)
#define bf16_BITS(value) even_bits(value)
#define bf16_VALUE(bits) float_of((bits) << 16)
#define bf16_LOAD(stored) ((uint32_t)(stored))
#define bf16_STORE(bits) ((bf16)(bits))

/* The bits of an old weight, and of what makes its master; IS_FOREIGN: writing the master, if it is no NaN, would not
   give these bits. A remainder makes its master with its weight but where `join` ignores it. */
#define own_WEIGHT_BITS(stored) bits_of(stored)
#define own_WEIGHT_OF(bits) float_of(bits)
#define own_REST_BITS(stored) 0
#define own_SET_REST(i, bits) (void)(bits)
#define own_IS_FOREIGN(i, master) 0
#define compact_WEIGHT_BITS(stored) (stored)
#define compact_WEIGHT_OF(bits) (bf16)(bits)
#define compact_REST_BITS(stored) ((uint16_t)(stored))
#define compact_SET_REST(i, bits) rest[i] = (int16_t)(bits)
#define compact_IS_FOREIGN(i, master) (((weight[i] & 0x7fff) == 0) & (rest[i] < 0))

/* Whole lines go past the caches: nobody reads them soon, and they need not be read first. */
static inline void store_codes(int8_t *to, const int8_t *from, int64_t size) {
#ifdef __SSE2__
  if (size == TILE && (uintptr_t)to % CACHE_LINE == 0) {
    for (int part = 0; part < TILE / (int)sizeof(__m128i); part++)
      _mm_stream_si128((__m128i *)to + part, _mm_load_si128((const __m128i *)from + part));
    return;
  }
#endif
  memcpy(to, from, (size_t)size);
}

/* To be called before other threads read memory that was stored past the caches. */
static inline void finish_stores(void) {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

/* The old numbers from the new ones, but for rounding. `back` is the inverse of the factor that the rule has. */
static inline float last_exp_avg(float g, float m, float lerp, float back) { return (m - lerp * g) * back; }
static inline float last_exp_avg_sq(float g, float v, float rest2, float back) { return (v - rest2 * g * g) * back; }
static inline float last_master(float value, float change, float back) { return (value - change) * back; }

#define UPDATE_TILE(KIND, WEIGHT, GRADIENT, FROM, SIZE)                                                               \
  {                                                                                                                   \
    int64_t from = FROM, size = SIZE;                                                                                 \
    WEIGHT old_weight[TILE];                                                                                          \
    OF(KIND, rest) old_rest[TILE];                                                                                    \
    OF(MOMENT, moment) old_m[TILE], old_v[TILE];                                                                      \
    int16_t m_off[TILE], v_off[TILE], master_off[TILE], is_far[TILE];                                                 \
    int8_t codes_of[3][TILE] __attribute__((aligned(CACHE_LINE)));                                                    \
    uint32_t any = 0;                                                                                                 \
    memcpy(old_weight, weight + from, (size_t)size * sizeof *weight);                                                    \
    if (OF(KIND, HAS_REST)) memcpy(old_rest, rest + from, (size_t)size * sizeof *rest);                               \
    memcpy(old_m, exp_avg + from, (size_t)size * sizeof *exp_avg);                                                    \
    memcpy(old_v, exp_avg_sq + from, (size_t)size * sizeof *exp_avg_sq);                                              \
    _Pragma("omp simd reduction(| : any)") for (int64_t k = 0; k < size; k++) {                                       \
      int64_t i = from + k;                                                                                           \
      float g = load_##GRADIENT(gradient[i]), master = OF(KIND, READ)(i);                                             \
      uint32_t foreign = OF(KIND, IS_FOREIGN)(i, master);                                                             \
      uint32_t m_bits = OF(MOMENT, LOAD)(exp_avg[i]), v_bits = OF(MOMENT, LOAD)(exp_avg_sq[i]);                       \
      squares[k] += g * g;                                                                                            \
      float m = next_exp_avg(g, OF(MOMENT, VALUE)(m_bits), lerp, towards);                                            \
      float v = next_exp_avg_sq(g, OF(MOMENT, VALUE)(v_bits), beta2, rest2);                                          \
      float change = change_of(m, v, correction, eps, step_size);                                                     \
      float value = master * decay + change;                                                                          \
      uint32_t new_m = OF(MOMENT, BITS)(m), new_v = OF(MOMENT, BITS)(v);                                              \
      float near_m = last_exp_avg(g, OF(MOMENT, VALUE)(new_m), lerp, back1);                                          \
      float near_v = last_exp_avg_sq(g, OF(MOMENT, VALUE)(new_v), rest2, back2);                                      \
      float near_master = last_master(value, change, back);                                                           \
      uint32_t m_by = m_bits - OF(MOMENT, BITS)(near_m);                                                              \
      uint32_t v_by = v_bits - OF(MOMENT, BITS)(near_v);                                                              \
      uint32_t master_by = bits_of(master) - bits_of(near_master);                                                    \
      uint32_t far = foreign | (((m_by + 128u) | (v_by + 128u) | (master_by + 128u)) > 255u) |                        \
                     (near_m != near_m) | (near_v != near_v) | (near_master != near_master);                          \
      exp_avg[i] = OF(MOMENT, STORE)(new_m);                                                                          \
      exp_avg_sq[i] = OF(MOMENT, STORE)(new_v);                                                                       \
      OF(KIND, WRITE)(i, value);                                                                                      \
      m_off[k] = (int16_t)m_by;                                                                                       \
      v_off[k] = (int16_t)v_by;                                                                                       \
      master_off[k] = (int16_t)master_by;                                                                             \
      is_far[k] = (int16_t)far;                                                                                       \
      any |= far;                                                                                                     \
    }                                                                                                                 \
    for (int64_t k = 0; k < size; k++) codes_of[0][k] = (int8_t)m_off[k];                                             \
    for (int64_t k = 0; k < size; k++) codes_of[1][k] = (int8_t)v_off[k];                                             \
    for (int64_t k = 0; k < size; k++) codes_of[2][k] = (int8_t)master_off[k];                                        \
    for (int64_t n = 0; n < 3; n++) store_codes(code + n * row + from, codes_of[n], size);                            \
    if (any)                                                                                                          \
      for (int64_t k = 0; k < size; k++)                                                                              \
        if (is_far[k])                                                                                                \
          entries[done.entries++] =                                                                                   \
              (entry){(uint32_t)(from + k), OF(KIND, WEIGHT_BITS)(old_weight[k]), OF(KIND, REST_BITS)(old_rest[k]),   \
                      OF(MOMENT, LOAD)(old_m[k]), OF(MOMENT, LOAD)(old_v[k])};                                        \
  }

#define UNDO_TILE(KIND, GRADIENT, FROM, SIZE)                                                                         \
  {                                                                                                                   \
    int64_t from = FROM, size = SIZE;                                                                                 \
    int16_t m_off[TILE], v_off[TILE], master_off[TILE];                                                               \
    for (int64_t k = 0; k < size; k++) m_off[k] = code[from + k];                                                     \
    for (int64_t k = 0; k < size; k++) v_off[k] = code[row + from + k];                                               \
    for (int64_t k = 0; k < size; k++) master_off[k] = code[2 * row + from + k];                                      \
    _Pragma("omp simd") for (int64_t k = 0; k < size; k++) {                                                          \
      int64_t i = from + k;                                                                                           \
      float g = load_##GRADIENT(gradient[i]), value = OF(KIND, READ)(i);                                              \
      float near_m = last_exp_avg(g, OF(MOMENT, VALUE)(OF(MOMENT, LOAD)(exp_avg[i])), lerp, back1);                   \
      float near_v = last_exp_avg_sq(g, OF(MOMENT, VALUE)(OF(MOMENT, LOAD)(exp_avg_sq[i])), rest2, back2);            \
      uint32_t m_bits = OF(MOMENT, BITS)(near_m) + (uint32_t)m_off[k];                                                \
      uint32_t v_bits = OF(MOMENT, BITS)(near_v) + (uint32_t)v_off[k];                                                \
      float m = next_exp_avg(g, OF(MOMENT, VALUE)(m_bits), lerp, towards);                                            \
      float v = next_exp_avg_sq(g, OF(MOMENT, VALUE)(v_bits), beta2, rest2);                                          \
      float near_master = last_master(value, change_of(m, v, correction, eps, step_size), back);                      \
      exp_avg[i] = OF(MOMENT, STORE)(m_bits);                                                                         \
      exp_avg_sq[i] = OF(MOMENT, STORE)(v_bits);                                                                      \
      OF(KIND, WRITE)(i, float_of(bits_of(near_master) + (uint32_t)master_off[k]));                                   \
    }                                                                                                                 \
  }

/* A block's part of each tensor, and the factors. */
#define RANGE(KIND, WEIGHT, GRADIENT)                                                                                 \
  int64_t start = b * BLOCK;                                                                                          \
  int64_t length = count - start < BLOCK ? count - start : BLOCK;                                                     \
  WEIGHT *weight = (WEIGHT *)weights + start;                                                                         \
  const GRADIENT *gradient = (const GRADIENT *)gradients + start;                                                     \
  OF(KIND, rest) *rest __attribute__((unused)) = (OF(KIND, rest) *)rests + (OF(KIND, HAS_REST) ? start : 0);          \
  OF(MOMENT, moment) *exp_avg = (OF(MOMENT, moment) *)exp_avgs + start;                                               \
  OF(MOMENT, moment) *exp_avg_sq = (OF(MOMENT, moment) *)exp_avg_sqs + start;                                         \
  int8_t *code = codes + start;                                                                                       \
  entry *entries = all_entries + b * ENTRIES(BLOCK);

/* Returns 1 if all elements were updated. Adds up the squares of the gradients of those that were. */
#define UPDATE(NAME, KIND, WEIGHT, GRADIENT)                                                                          \
  int NAME(int64_t count, int threads, void *weights, const void *gradients, void *rests, void *exp_avgs,             \
           void *exp_avg_sqs, int8_t *codes, int64_t row, entry *all_entries, progress *blocks_done,                  \
           double *squares_of_all, float decay, float lerp, float beta2, float rest2, float correction, float eps,    \
           float step_size, float back1, float back2, float back) {                                                   \
    int64_t blocks = (count + BLOCK - 1) / BLOCK;                                                                     \
    float towards = lerp < 0.5f ? lerp : lerp - 1.0f;                                                                 \
    int full = 0;                                                                                                     \
    double sum = 0;                                                                                                   \
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : sum) if (blocks > 1)")             \
    for (int64_t b = 0; b < blocks; b++) {                                                                            \
      RANGE(KIND, WEIGHT, GRADIENT)                                                                                   \
      int64_t room = ENTRIES(length);                                                                                 \
      progress done = {0, 0};                                                                                         \
      float squares[TILE] = {0};                                                                                      \
      int stop;                                                                                                       \
      _Pragma("omp atomic read") stop = full;                                                                         \
      for (int64_t begin = 0; begin < length && !stop; begin += TILE) {                                               \
        if (done.entries + TILE > room) {                                                                             \
          _Pragma("omp atomic write") full = 1;                                                                       \
          break;                                                                                                      \
        }                                                                                                             \
        PREFETCH_TILE(KIND, begin);                                                                                   \
        if (begin + TILE <= length)                                                                                   \
          UPDATE_TILE(KIND, WEIGHT, GRADIENT, begin, TILE)                                                            \
        else                                                                                                          \
          UPDATE_TILE(KIND, WEIGHT, GRADIENT, begin, length - begin)                                                  \
        done.updated = (int32_t)(begin + TILE <= length ? begin + TILE : length);                                     \
      }                                                                                                               \
      for (int64_t k = 0; k < TILE; k++) sum += (double)squares[k];                                                   \
      blocks_done[b] = done;                                                                                          \
      finish_stores();                                                                                                \
    }                                                                                                                 \
    *squares_of_all = sum;                                                                                            \
    return !full;                                                                                                     \
  }

#define UNDO(NAME, KIND, WEIGHT, GRADIENT)                                                                            \
  void NAME(int64_t count, int threads, void *weights, const void *gradients, void *rests, void *exp_avgs,            \
            void *exp_avg_sqs, int8_t *codes, int64_t row, entry *all_entries, progress *blocks_done, float lerp,     \
            float beta2, float rest2, float correction, float eps, float step_size, float back1, float back2,         \
            float back) {                                                                                             \
    int64_t blocks = (count + BLOCK - 1) / BLOCK;                                                                     \
    float towards = lerp < 0.5f ? lerp : lerp - 1.0f;                                                                 \
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic) if (blocks > 1)")                                \
    for (int64_t b = 0; b < blocks; b++) {                                                                            \
      RANGE(KIND, WEIGHT, GRADIENT)                                                                                   \
      (void)length;                                                                                                   \
      progress done = blocks_done[b];                                                                                 \
      for (int64_t begin = 0; begin < done.updated; begin += TILE) {                                                  \
        PREFETCH_TILE(KIND, begin);                                                                                   \
        if (begin + TILE <= done.updated)                                                                             \
          UNDO_TILE(KIND, GRADIENT, begin, TILE)                                                                      \
        else                                                                                                          \
          UNDO_TILE(KIND, GRADIENT, begin, done.updated - begin)                                                      \
      }                                                                                                               \
      for (int64_t e = 0; e < done.entries; e++) {                                                                    \
        entry old = entries[e];                                                                                       \
        weight[old.place] = OF(KIND, WEIGHT_OF)(old.weight);                                                          \
        OF(KIND, SET_REST)(old.place, old.rest);                                                                      \
        exp_avg[old.place] = OF(MOMENT, STORE)(old.exp_avg);                                                          \
        exp_avg_sq[old.place] = OF(MOMENT, STORE)(old.exp_avg_sq);                                                    \
      }                                                                                                               \
    }                                                                                                                 \
  }

/* Named after the dtypes of weight and gradient. */
#define BOTH(NAMES, KIND, WEIGHT, GRADIENT)                                                                           \
  UPDATE(update_##NAMES, KIND, WEIGHT, GRADIENT)                                                                      \
  UNDO(undo_##NAMES, KIND, WEIGHT, GRADIENT)

BOTH(bfloat16_bfloat16, MASTER, bf16, bf16)
BOTH(bfloat16_float32, MASTER, bf16, float)
BOTH(float32_bfloat16, own, float, bf16)
BOTH(float32_float32, own, float, float)
