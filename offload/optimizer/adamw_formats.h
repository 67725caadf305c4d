/* The formats of masters and moments, and the AdamW rule (Loshchilov and Hutter 2019) of one element.

   Compiled for one format of masters, MASTER, and one of moments, MOMENT; a format is the few macros under its name
   below. float32 weights are their own masters in every format. Whoever includes this file names a range's tensors
   weight, rest, exp_avg and exp_avg_sq.

   The order of operations and the two fused multiply-adds are those of torch's fused CPU kernel as its builds have it,
   so the results are equal bit for bit; the compiler must contract no other operations. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 65536
/* A tile of 8-bit moments is one block of theirs, with a scale of its own. */
#ifndef TILE
#define TILE (QUANTISED ? 256 : 32)
#endif
/* Elements between use and prefetch. A prefetch past the end of a tensor is harmless. */
#define AHEAD 256
#define CACHE_LINE 64

#define PASTE(A, B) A##_##B
#define OF(FORMAT, OPERATION) PASTE(FORMAT, OPERATION)

#define PREFETCH(POINTER)                                                                                             \
  for (uint64_t byte = 0; byte < TILE * sizeof *(POINTER); byte += CACHE_LINE)                                        \
    __builtin_prefetch((const char *)((POINTER) + AHEAD) + byte)

#define PREFETCH_TILE(KIND, FROM)                                                                                     \
  PREFETCH(gradient + (FROM));                                                                                        \
  if (OF(KIND, HAS_REST)) PREFETCH(rest + (FROM));                                                                    \
  PREFETCH(weight + (FROM));                                                                                          \
  PREFETCH(exp_avg + (FROM));                                                                                         \
  PREFETCH(exp_avg_sq + (FROM))

typedef uint16_t bf16;

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float load_float(float value) { return value; }
static inline float load_bf16(bf16 value) { return float_of((uint32_t)value << 16); }

/* To nearest, ties to even: moments. A NaN stays a NaN, here and below. */
static inline uint32_t even_bits(float value) {
  uint32_t bits = bits_of(value);
  return value != value ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static inline bf16 to_even(float value) { return (bf16)even_bits(value); }

/* To nearest, ties away from zero: weights, so that weight and remainder determine the master. */
static inline bf16 to_away(float value) { return value != value ? 0x7fc0 : (bf16)((bits_of(value) + 0x8000) >> 16); }

/* Up or down, with probabilities that make the mean exact. */
static inline bf16 to_either(float value, uint32_t noise) {
  return value != value ? 0x7fc0 : (bf16)((bits_of(value) + (noise & 0xffff)) >> 16);
}

/* Wellons' lowbias32. */
static inline uint32_t mix(uint32_t bits) {
  bits = (bits ^ bits >> 16) * 0x7feb352du;
  bits = (bits ^ bits >> 15) * 0x846ca68bu;
  return bits ^ bits >> 16;
}

/* `lerp` is 1 - beta1. From 0.5 up torch interpolates from the gradient's end; `towards` is then `lerp` - 1. */
static inline float next_exp_avg(float g, float m, float lerp, float towards) {
  return fmaf(towards, g - m, lerp < 0.5f ? m : g);
}
static inline float next_exp_avg_sq(float g, float v, float beta2, float rest2) {
  return fmaf(rest2 * g, g, v * beta2);
}
static inline float change_of(float m, float v, float correction, float eps, float step_size) {
  return -step_size * m / (sqrtf(v) / correction + eps);
}

/* Masters. READ and WRITE are for element i. */

typedef float own_rest;
typedef int16_t compact_rest;
typedef char stochastic_rest;

#define own_READ(i) weight[i]
#define own_WRITE(i, value) weight[i] = (value)
#define own_HAS_REST 0

/* The master's bits are 65536 times the weight's plus the remainder. A negative one under a zero is outdated. */
static inline float join(bf16 weight, int16_t remainder) {
  int32_t rest = (weight & 0x7fff) == 0 && remainder < 0 ? 0 : remainder;
  return float_of(((uint32_t)weight << 16) + (uint32_t)rest);
}
static inline int16_t remainder_of(float value) { return value != value ? 0 : (int16_t)bits_of(value); }
#define compact_READ(i) join(weight[i], rest[i])
#define compact_WRITE(i, value) rest[i] = remainder_of(value), weight[i] = to_away(value)
#define compact_HAS_REST 1

#define stochastic_READ(i) load_bf16(weight[i])
#define stochastic_WRITE(i, value) weight[i] = to_either(value, mix((uint32_t)(first + i) ^ key))
#define stochastic_HAS_REST 0

/* Moments. BEGIN and END surround a tile. */

typedef float fp32_moment;
typedef bf16 bf16_moment;
typedef uint8_t int8_moment;

#define fp32_BEGIN(from, to)
#define fp32_GET(moment, i, from) moment[i]
#define fp32_SET(moment, i, from, value) moment[i] = (value)
#define fp32_END(from, to)

#define bf16_BEGIN(from, to)
#define bf16_GET(moment, i, from) load_bf16(moment[i])
#define bf16_SET(moment, i, from, value) moment[i] = to_even(value)
#define bf16_END(from, to)

#if QUANTISED
/* Codes of 8 bits, by the tables of native_kernel.py. A tile is one block of theirs, read and written in float32.
   `kind` is 0 for signed numbers, the first moment, and 1 for unsigned ones, the second. */

#define BINS (LAST_BIN - FIRST_BIN + 1)

/* Of signed numbers, then of unsigned ones. Flat, because gcc gathers from no row of an array. */
static float maps[2 * 256];
/* Of positive numbers, negative ones and unsigned ones. A bin holds the magnitudes that begin with the same 16 bits:
   its upper half is the map's entry at its beginning, the next entry is nearer above its lower half. */
static int32_t bins[3 * BINS];

void set_maps(const float *all_maps, const int32_t *all_bins) {
  memcpy(maps, all_maps, sizeof maps);
  memcpy(bins, all_bins, sizeof bins);
}

static inline int32_t nearest(float value, int kind) {
  uint32_t bits = bits_of(value), negative = bits >> 31;
  int32_t bin = (int32_t)((bits & 0x7fffffff) >> 16) - FIRST_BIN;
  bin = bin < 0 ? 0 : bin > BINS - 1 ? BINS - 1 : bin;
  int32_t found = bins[(kind ? 2 : (int32_t)negative) * BINS + bin];
  int32_t next = (int32_t)(bits & 0xffff) > (found & 0xffff);
  return (found >> 16) + (negative ? -next : next);
}

/* Functions of their own: inlined in each of the four updates they would take seconds to compile. */
static __attribute__((noinline)) void decode(const uint8_t *codes, float scale, float *values, int64_t count,
                                             int kind) {
  for (int64_t i = 0; i < count; i++) values[i] = maps[256 * kind + codes[i]] * scale;
}

/* `largest` has the bits of the largest magnitude. Where a number is not finite, it is not either: the scale is then a
   NaN, and the codes are those of the torch kernel, which divides by one. 0 / 0 is no number. Codes are narrowed to
   bytes in a loop of their own: a compiler that meets bytes and floats in one loop takes as many floats at once as
   bytes fill a register, and runs out of registers. */
static __attribute__((noinline)) void encode(const float *values, uint32_t largest, uint8_t *codes, float *scale,
                                             int64_t count, int kind) {
  int is_finite = largest < 0x7f800000;
  float divisor = is_finite && largest ? float_of(largest) : 1;
  int32_t entries[TILE];
  *scale = float_of(is_finite ? largest : 0x7fc00000);
  _Pragma("omp simd") for (int64_t i = 0; i < count; i++) {
    float value = values[i] / divisor;
    int32_t entry = nearest(value, kind);
    entry = kind && values[i] > 0 && entry < 1 ? 1 : entry;
    entries[i] = value != value ? 255 : entry;
  }
  for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)entries[i];
}

static inline uint32_t larger(uint32_t one, uint32_t other) { return one > other ? one : other; }

#define int8_BEGIN(from, to)                                                                                          \
  float new_exp_avg[TILE], new_exp_avg_sq[TILE], old_exp_avg[TILE], old_exp_avg_sq[TILE];                             \
  decode(exp_avg + (from), exp_avg_scale[(from) / TILE], old_exp_avg, (to) - (from), 0);                              \
  decode(exp_avg_sq + (from), exp_avg_sq_scale[(from) / TILE], old_exp_avg_sq, (to) - (from), 1);
#define int8_GET(moment, i, from) old_##moment[(i) - (from)]
#define int8_SET(moment, i, from, value)                                                                              \
  moment##_largest = larger(moment##_largest, bits_of(value) & 0x7fffffff), new_##moment[(i) - (from)] = (value)
#define int8_END(from, to)                                                                                            \
  encode(new_exp_avg, exp_avg_largest, exp_avg + (from), exp_avg_scale + (from) / TILE, (to) - (from), 0);            \
  encode(new_exp_avg_sq, exp_avg_sq_largest, exp_avg_sq + (from), exp_avg_sq_scale + (from) / TILE, (to) - (from), 1);
#endif
