/* AdamW that can be undone: the update of adamw_kernel.c with a log, from which `undo` makes the old bits again.

   Both estimate each old number from the new one, by the inverse of the rule in float32, in the same order of
   operations. The log has, in a signed byte, how many floats the old number is from its estimate. Elements of which a
   number is farther away become entries, which have the old bits of all their numbers. So do elements with a NaN, and
   those whose weight or remainder is not what writing their master gives, because somebody else has written it.

   An update stops where the entries of a block are full, and says so; what it has updated can be undone. Compiled for
   one format, as adamw_kernel.c is: masters that are compact or fp32, moments that are fp32 or bf16. */

#include "adamw_formats.h"

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

/* The place of a number in the order of all floats: its neighbour's is one more or less. It is its own inverse. */
static inline uint32_t float_order(uint32_t bits) { return bits ^ ((uint32_t)((int32_t)bits >> 31) >> 1); }
static inline uint32_t bf16_order(uint32_t bits) {
  int32_t number = (int32_t)(bits << 16) >> 16;
  return (uint32_t)(number ^ (number >> 31 & 0x7fff));
}

/* A number as it is stored: its bits, its value, and its place among the numbers of its format. */
#define fp32_BITS(stored) bits_of(stored)
#define fp32_OF_BITS(bits) float_of(bits)
#define fp32_VALUE(stored) (stored)
#define fp32_ROUND(value) (value)
#define fp32_ORDER(bits) float_order(bits)
#define bf16_BITS(stored) ((uint32_t)(stored))
#define bf16_OF_BITS(bits) ((bf16)(bits))
#define bf16_VALUE(stored) load_bf16(stored)
#define bf16_ROUND(value) to_even(value)
#define bf16_ORDER(bits) bf16_order(bits)

/* The bits of a weight, and of what makes its master; IS_PLAIN: writing the master, if it is no
   NaN, gives these bits again. */
#define own_WEIGHT_BITS(i) bits_of(weight[i])
#define own_SET_WEIGHT(i, bits) weight[i] = float_of(bits)
#define own_REST_BITS(i) 0
#define own_SET_REST(i, bits) (void)(bits)
#define own_IS_PLAIN(i, master) 1
#define fp32_WEIGHT_BITS(i) ((uint32_t)weight[i])
#define fp32_SET_WEIGHT(i, bits) weight[i] = (bf16)(bits)
#define fp32_REST_BITS(i) bits_of(rest[i])
#define fp32_SET_REST(i, bits) rest[i] = float_of(bits)
#define fp32_IS_PLAIN(i, master) (fp32_WEIGHT_BITS(i) == (bits_of(master) + 0x8000) >> 16)
#define compact_WEIGHT_BITS(i) ((uint32_t)weight[i])
#define compact_SET_WEIGHT(i, bits) weight[i] = (bf16)(bits)
#define compact_REST_BITS(i) ((uint32_t)(uint16_t)rest[i])
#define compact_SET_REST(i, bits) rest[i] = (int16_t)(bits)
#define compact_IS_PLAIN(i, master)                                                                                   \
  ((compact_WEIGHT_BITS(i) == (bits_of(master) + 0x8000) >> 16) & (compact_REST_BITS(i) == (bits_of(master) & 0xffff)))

/* The old numbers from the new ones, but for rounding. `back` is the inverse of the factor that the rule has. */
static inline float last_exp_avg(float g, float m, float lerp, float back) { return (m - lerp * g) * back; }
static inline float last_exp_avg_sq(float g, float v, float rest2, float back) { return (v - rest2 * g * g) * back; }
static inline float last_master(float value, float change, float back) { return (value - change) * back; }

#define UPDATE_TILE(KIND, GRADIENT, FROM, TO)                                                                         \
  {                                                                                                                   \
    __typeof__(weight) out = weight + (FROM);                                                                         \
    uint32_t old_weight[TILE], old_rest[TILE], old_m[TILE], old_v[TILE], far[TILE];                                   \
    float square[TILE];                                                                                               \
    _Pragma("omp simd") for (int64_t i = FROM; i < TO; i++) {                                                         \
      int64_t k = i - (FROM);                                                                                         \
      float g = load_##GRADIENT(gradient[i]);                                                                         \
      square[k] = g * g;                                                                                              \
      uint32_t m_bits = OF(MOMENT, BITS)(exp_avg[i]), v_bits = OF(MOMENT, BITS)(exp_avg_sq[i]);                       \
      float master = OF(KIND, READ)(i);                                                                               \
      int plain = OF(KIND, IS_PLAIN)(i, master);                                                                      \
      old_weight[k] = OF(KIND, WEIGHT_BITS)(i);                                                                       \
      old_rest[k] = OF(KIND, REST_BITS)(i);                                                                           \
      old_m[k] = m_bits;                                                                                              \
      old_v[k] = v_bits;                                                                                              \
      float m = next_exp_avg(g, OF(MOMENT, VALUE)(exp_avg[i]), lerp, towards);                                        \
      float v = next_exp_avg_sq(g, OF(MOMENT, VALUE)(exp_avg_sq[i]), beta2, rest2);                                   \
      float change = change_of(m, v, correction, eps, step_size);                                                     \
      float value = master * decay + change;                                                                          \
      OF(MOMENT, moment) new_m = OF(MOMENT, ROUND)(m), new_v = OF(MOMENT, ROUND)(v);                                  \
      exp_avg[i] = new_m;                                                                                             \
      exp_avg_sq[i] = new_v;                                                                                          \
      OF(KIND, WRITE)(i, k, value);                                                                                   \
      float near_m = last_exp_avg(g, OF(MOMENT, VALUE)(new_m), lerp, back1);                                          \
      float near_v = last_exp_avg_sq(g, OF(MOMENT, VALUE)(new_v), rest2, back2);                                      \
      float near_master = last_master(value, change, back);                                                           \
      uint32_t m_off = OF(MOMENT, ORDER)(m_bits) - OF(MOMENT, ORDER)(OF(MOMENT, BITS)(OF(MOMENT, ROUND)(near_m)));    \
      uint32_t v_off = OF(MOMENT, ORDER)(v_bits) - OF(MOMENT, ORDER)(OF(MOMENT, BITS)(OF(MOMENT, ROUND)(near_v)));    \
      uint32_t master_off = float_order(bits_of(master)) - float_order(bits_of(near_master));                         \
      m_code[i] = (int8_t)m_off;                                                                                      \
      v_code[i] = (int8_t)v_off;                                                                                      \
      master_code[i] = (int8_t)master_off;                                                                            \
      uint32_t is_far = (m_off + 128u > 255u) | (v_off + 128u > 255u) | (master_off + 128u > 255u) | !plain |         \
                   (near_m != near_m) | (near_v != near_v) | (near_master != near_master);                            \
      far[k] = is_far;                                                                                                \
    }                                                                                                                 \
    uint32_t any = 0;                                                                                                 \
    float squares = 0;                                                                                                \
    for (int64_t k = 0; k < (TO) - (FROM); k++) any |= far[k];                                                        \
    _Pragma("omp simd reduction(+ : squares)") for (int64_t k = 0; k < (TO) - (FROM); k++) squares += square[k];      \
    sum += (double)squares;                                                                                           \
    if (any)                                                                                                          \
      for (int64_t k = 0; k < (TO) - (FROM); k++)                                                                     \
        if (far[k])                                                                                                   \
          entries[done.entries++] = (entry){(uint32_t)((FROM) + k), old_weight[k], old_rest[k], old_m[k], old_v[k]};  \
  }

/* A block's part of each tensor. */                                                                                  \
#define RANGE(KIND, WEIGHT, GRADIENT)                                                                                 \
  int64_t start = b * BLOCK;                                                                                          \
  int64_t length = count - start < BLOCK ? count - start : BLOCK;                                                     \
  WEIGHT *weight = (WEIGHT *)weights + start;                                                                         \
  const GRADIENT *gradient = (const GRADIENT *)gradients + start;                                                     \
  OF(KIND, rest) *rest __attribute__((unused)) = (OF(KIND, rest) *)rests + (OF(KIND, HAS_REST) ? start : 0);          \
  OF(MOMENT, moment) *exp_avg = (OF(MOMENT, moment) *)exp_avgs + start;                                               \
  OF(MOMENT, moment) *exp_avg_sq = (OF(MOMENT, moment) *)exp_avg_sqs + start;                                         \
  int8_t *m_code = codes + start, *v_code = codes + count + start, *master_code = codes + 2 * count + start;          \
  entry *entries = all_entries + b * ENTRIES(BLOCK);

/* Returns 1 if all elements were updated. Adds up the squares of the gradients of those that were. */                \
#define UPDATE(NAME, KIND, WEIGHT, GRADIENT)                                                                          \
  int NAME(int64_t count, int threads, void *weights, const void *gradients, void *rests, void *exp_avgs,             \
           void *exp_avg_sqs, int8_t *codes, entry *all_entries, progress *blocks_done, double *squares_of_all,       \
           float decay, float lerp, float beta2, float rest2, float correction, float eps, float step_size,           \
           float back1, float back2, float back) {                                                                    \
    int64_t blocks = (count + BLOCK - 1) / BLOCK;                                                                     \
    float towards = lerp < 0.5f ? lerp : lerp - 1.0f;                                                                 \
    int full = 0;                                                                                                     \
    double sum = 0;                                                                                                   \
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic) reduction(+ : sum) if (blocks > 1)")             \
    for (int64_t b = 0; b < blocks; b++) {                                                                            \
      RANGE(KIND, WEIGHT, GRADIENT)                                                                                   \
      int64_t room = ENTRIES(length);                                                                                 \
      progress done = {0, 0};                                                                                         \
      int stop;                                                                                                       \
      _Pragma("omp atomic read") stop = full;                                                                         \
      for (int64_t tile = 0; tile < length && !stop; tile += TILE) {                                                  \
        if (done.entries + TILE > room) {                                                                             \
          _Pragma("omp atomic write") full = 1;                                                                       \
          break;                                                                                                      \
        }                                                                                                             \
        PREFETCH(gradient + tile);                                                                                    \
        if (OF(KIND, HAS_REST)) PREFETCH(rest + tile);                                                                \
        PREFETCH(weight + tile);                                                                                      \
        PREFETCH(exp_avg + tile);                                                                                     \
        PREFETCH(exp_avg_sq + tile);                                                                                  \
        if (tile + TILE <= length)                                                                                    \
          UPDATE_TILE(KIND, GRADIENT, tile, tile + TILE)                                                              \
        else                                                                                                          \
          UPDATE_TILE(KIND, GRADIENT, tile, length)                                                                   \
        done.updated = (int32_t)(tile + TILE <= length ? tile + TILE : length);                                       \
      }                                                                                                               \
      blocks_done[b] = done;                                                                                          \
    }                                                                                                                 \
    *squares_of_all = sum;                                                                                            \
    return !full;                                                                                                     \
  }

#define UNDO(NAME, KIND, WEIGHT, GRADIENT)                                                                            \
  void NAME(int64_t count, int threads, void *weights, const void *gradients, void *rests, void *exp_avgs,            \
            void *exp_avg_sqs, int8_t *codes, entry *all_entries, progress *blocks_done, float lerp, float beta2,     \
            float rest2, float correction, float eps, float step_size, float back1, float back2, float back) {        \
    int64_t blocks = (count + BLOCK - 1) / BLOCK;                                                                     \
    float towards = lerp < 0.5f ? lerp : lerp - 1.0f;                                                                 \
    _Pragma("omp parallel for num_threads(threads) schedule(dynamic) if (blocks > 1)")                                \
    for (int64_t b = 0; b < blocks; b++) {                                                                            \
      RANGE(KIND, WEIGHT, GRADIENT)                                                                                   \
      (void)length;                                                                                                   \
      progress done = blocks_done[b];                                                                                 \
      WEIGHT *out = weight;                                                                                           \
      _Pragma("omp simd") for (int64_t i = 0; i < done.updated; i++) {                                                \
        float g = load_##GRADIENT(gradient[i]);                                                                       \
        float near_m = last_exp_avg(g, OF(MOMENT, VALUE)(exp_avg[i]), lerp, back1);                                   \
        float near_v = last_exp_avg_sq(g, OF(MOMENT, VALUE)(exp_avg_sq[i]), rest2, back2);                            \
        uint32_t m_order = OF(MOMENT, ORDER)(OF(MOMENT, BITS)(OF(MOMENT, ROUND)(near_m))) + (uint32_t)m_code[i];      \
        uint32_t v_order = OF(MOMENT, ORDER)(OF(MOMENT, BITS)(OF(MOMENT, ROUND)(near_v))) + (uint32_t)v_code[i];      \
        OF(MOMENT, moment) old_m = OF(MOMENT, OF_BITS)(OF(MOMENT, ORDER)(m_order));                                   \
        OF(MOMENT, moment) old_v = OF(MOMENT, OF_BITS)(OF(MOMENT, ORDER)(v_order));                                   \
        exp_avg[i] = old_m;                                                                                           \
        exp_avg_sq[i] = old_v;                                                                                        \
        float m = next_exp_avg(g, OF(MOMENT, VALUE)(old_m), lerp, towards);                                           \
        float v = next_exp_avg_sq(g, OF(MOMENT, VALUE)(old_v), beta2, rest2);                                         \
        float near_master = last_master(OF(KIND, READ)(i), change_of(m, v, correction, eps, step_size), back);        \
        float master = float_of(float_order(float_order(bits_of(near_master)) + (uint32_t)master_code[i]));           \
        OF(KIND, WRITE)(i, i, master);                                                                                \
      }                                                                                                               \
      for (int64_t e = 0; e < done.entries; e++) {                                                                    \
        entry old = entries[e];                                                                                       \
        OF(KIND, SET_WEIGHT)(old.place, old.weight);                                                                  \
        OF(KIND, SET_REST)(old.place, old.rest);                                                                      \
        exp_avg[old.place] = OF(MOMENT, OF_BITS)(old.exp_avg);                                                        \
        exp_avg_sq[old.place] = OF(MOMENT, OF_BITS)(old.exp_avg_sq);                                                  \
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
