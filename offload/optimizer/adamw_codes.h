/* Moments of 8 bits: numbers of a block from its codes, and codes from its numbers.

   Included by adamw_formats.h. This is the general form, which compilers vectorise with gathers. Where a processor
   permutes bytes, adamw_codes_vbmi.h encodes and decodes in place of it, with equal bits; PLAIN_CODES leaves that out.
   `kind` is 0 for signed numbers, the first moment, and 1 for unsigned ones, the second. */

#define MAP_SIZE 256
#define LINES __attribute__((aligned(CACHE_LINE)))
#define BINS (LAST_BIN - FIRST_BIN + 1)
#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && !defined(PLAIN_CODES)
#define HAS_VBMI 1
#else
#define HAS_VBMI 0
#endif

/* Of signed numbers, then of unsigned ones. Flat, because gcc gathers from no row of an array. */
static float maps[2 * MAP_SIZE];
/* Of positive numbers, negative ones and unsigned ones. A bin holds the magnitudes that begin with the same 16 bits:
   its upper half is the map's entry at its beginning, the next entry is nearer above its lower half. */
static int32_t bins[3 * BINS];

static inline int32_t nearest(float value, int kind) {
  uint32_t bits = bits_of(value), negative = bits >> 31;
  int32_t bin = (int32_t)((bits & 0x7fffffff) >> 16) - FIRST_BIN;
  bin = bin < 0 ? 0 : bin > BINS - 1 ? BINS - 1 : bin;
  int32_t found = bins[(kind ? 2 : (int32_t)negative) * BINS + bin];
  int32_t next = (int32_t)(bits & 0xffff) > (found & 0xffff);
  return (found >> 16) + (negative ? -next : next);
}

#if STOCHASTIC_MOMENTS
/* One of the two nearest entries, with probabilities that make the mean exact. */
static inline int32_t either(float value, int kind, uint32_t noise) {
  const int32_t map = MAP_SIZE * kind;
  int32_t entry = nearest(value, kind);
  int32_t lower = entry - (maps[map + entry] > value);
  lower = lower < 0 ? 0 : lower > 254 ? 254 : lower;
  float width = maps[map + lower + 1] - maps[map + lower];
  return lower + (value - maps[map + lower] > (float)(noise & 0xffff) * 0x1p-16f * width);
}
#define CODE_OF(value, kind, noise) either(value, kind, noise)
#define KEEP_DRAW(i, draw) draws[i] = (draw)
#define KEPT_DRAW(i) draws[i]
#else
#define CODE_OF(value, kind, noise) nearest(value, kind)
#define KEEP_DRAW(i, draw) (void)(draw)
#define KEPT_DRAW(i) 0
#endif

/* Codes are narrowed to bytes in a loop of their own: a compiler that meets bytes and floats in one loop takes as many
   floats at once as bytes fill a register, and runs out of registers. */
static void encode_plainly(const float *values, float divisor, const uint32_t *draws, code *codes, int64_t count,
                           int kind) {
  int32_t entries[TILE];
  (void)draws;
  _Pragma("omp simd") for (int64_t i = 0; i < count; i++) {
    float value = values[i] / divisor;
    int32_t entry = CODE_OF(value, kind, KEPT_DRAW(i) >> 16 * kind);
    entry = kind && values[i] > 0 && entry < 1 ? 1 : entry;
    entries[i] = value != value ? 255 - STOCHASTIC_MOMENTS : entry;
  }
  for (int64_t i = 0; i < count; i++) codes[i] = (code)entries[i];
}

#if HAS_VBMI
#include "adamw_codes_vbmi.h"
#else
static inline void encode(const float *values, int is_finite, float divisor, float inverse, const uint32_t *draws,
                          code *codes, int64_t count, int kind) {
  (void)is_finite, (void)inverse;
  encode_plainly(values, divisor, draws, codes, count, kind);
}

static inline void decode(const code *codes, float scale, float *values, int64_t count, int kind) {
  for (int64_t i = 0; i < count; i++) values[i] = maps[MAP_SIZE * kind + codes[i]] * scale;
}
#endif

/* The tables of native_codes.py. `planes` are those of adamw_codes_vbmi.h. */
void set_maps(const float *all_maps, const int32_t *all_bins, const uint8_t *planes) {
  memcpy(maps, all_maps, sizeof maps);
  memcpy(bins, all_bins, sizeof bins);
#if HAS_VBMI
  memcpy(tables, planes, sizeof tables);
#else
  (void)planes;
#endif
}

static inline uint32_t larger(uint32_t one, uint32_t other) { return one > other ? one : other; }

/* `largest` has the bits of the largest magnitude. Where a number is not finite, it is not either: the scale is then a
   NaN, and the codes are those of the torch kernel, which divides by one. 0 / 0 is no number. */
static inline int is_finite(uint32_t largest) { return largest < 0x7f800000; }
static inline float scale_of(uint32_t largest) { return float_of(is_finite(largest) ? largest : 0x7fc00000); }
static inline float divisor_of(uint32_t largest) { return is_finite(largest) && largest ? float_of(largest) : 1; }

/* Functions of their own: inlined in each of the four updates they would take seconds to compile. `write_codes` takes
   both moments, because a processor would wait for the inverse of one. */
static __attribute__((noinline)) void read_codes(const code *exp_avg, const code *exp_avg_sq, float scale,
                                                 float sq_scale, float *values, float *sq_values, int64_t count) {
  decode(exp_avg, scale, values, count, 0);
  decode(exp_avg_sq, sq_scale, sq_values, count, 1);
}

static __attribute__((noinline)) void write_codes(const float *values, const float *sq_values, const uint32_t *draws,
                                                  uint32_t largest, uint32_t sq_largest, code *exp_avg,
                                                  code *exp_avg_sq, float *scale, float *sq_scale, int64_t count) {
  float divisor = divisor_of(largest), sq_divisor = divisor_of(sq_largest);
  float inverse = 1 / divisor, sq_inverse = 1 / sq_divisor;
  *scale = scale_of(largest);
  *sq_scale = scale_of(sq_largest);
  encode(values, is_finite(largest), divisor, inverse, draws, exp_avg, count, 0);
  encode(sq_values, is_finite(sq_largest), sq_divisor, sq_inverse, draws, exp_avg_sq, count, 1);
}

/* A tile is read and written in float32. Past the end of a short one the arrays have anything, and nothing of it is
   stored. `draw` gives both moments their noise. */
#define int8_BEGIN(from, to)                                                                                          \
  float new_exp_avg[TILE] LINES, new_exp_avg_sq[TILE] LINES, old_exp_avg[TILE] LINES, old_exp_avg_sq[TILE] LINES;     \
  uint32_t draws[TILE] LINES;                                                                                         \
  read_codes(exp_avg + (from), exp_avg_sq + (from), exp_avg_scale[(from) / TILE], exp_avg_sq_scale[(from) / TILE],    \
             old_exp_avg, old_exp_avg_sq, (to) - (from));
#define int8_GET(moment, i, from, signed_) old_##moment[(i) - (from)]
#define int8_SET(moment, i, from, value, noise)                                                                       \
  moment##_largest = larger(moment##_largest, bits_of(value) & 0x7fffffff), new_##moment[(i) - (from)] = (value)
#define int8_KEEP(i, from, draw) KEEP_DRAW((i) - (from), draw);
#define int8_END(from, to)                                                                                            \
  write_codes(new_exp_avg, new_exp_avg_sq, draws, exp_avg_largest, exp_avg_sq_largest, exp_avg + (from),              \
              exp_avg_sq + (from), exp_avg_scale + (from) / TILE, exp_avg_sq_scale + (from) / TILE, (to) - (from));
