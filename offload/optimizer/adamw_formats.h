/* The formats of masters and moments, and the AdamW rule (Loshchilov and Hutter 2019) of one element.

   Compiled for one format of masters, MASTER, and one of moments, MOMENT; a format is the few macros under its name
   below. float32 weights are their own masters in every format. Whoever includes this file names a range's tensors
   weight, rest, exp_avg and exp_avg_sq.

   The order of operations and the two fused multiply-adds are those of torch's fused CPU kernel as its builds have it,
   so the results are equal bit for bit; the compiler must contract no other operations. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define BLOCK 65536
/* A tile of 8-bit moments is one block of theirs, with a scale of its own. */
#ifndef TILE
#define TILE (QUANTISED ? 256 : 32)
#endif
/* Elements between use and prefetch. A prefetch past the end of a tensor is harmless. */
#define AHEAD 256
#define CACHE_LINE 64
#define MOMENT_NOISE 0x9e3779b9u

#define PASTE(A, B) A##_##B
#define OF(FORMAT, OPERATION) PASTE(FORMAT, OPERATION)

#define PREFETCH(POINTER)                                                                                             \
  for (uint64_t byte = 0; byte < TILE * sizeof *(POINTER); byte += CACHE_LINE)                                        \
    __builtin_prefetch((const char *)((POINTER) + AHEAD) + byte)

/* Stores whole cache lines past the caches; both addresses are those of lines. */
static inline void store_past_caches(void *to, const void *from, uint64_t bytes) {
#ifdef __SSE2__
  for (uint64_t part = 0; part < bytes / sizeof(__m128i); part++)
    _mm_stream_si128((__m128i *)to + part, _mm_load_si128((const __m128i *)from + part));
#else
  memcpy(to, from, bytes);
#endif
}

/* To be called before other threads, or a device, read memory that was stored past the caches. */
static inline void finish_stores(void) {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

typedef uint16_t bf16;
typedef uint8_t code;

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

/* Masters. READ and WRITE are for element i; the new weight goes to out[o]. WRITE_ONLY: the weight is not read. */

typedef float own_rest, fp32_rest;
typedef int16_t compact_rest;
typedef char stochastic_rest;
typedef bf16 kahan_rest;

#define own_READ(i) weight[i]
#define own_WRITE(i, o, value) (out)[o] = (value)
#define own_WRITE_ONLY 0
#define own_HAS_REST 0

#define fp32_READ(i) rest[i]
#define fp32_WRITE(i, o, value) rest[i] = (value), (out)[o] = to_away(value)
#define fp32_WRITE_ONLY 1
#define fp32_HAS_REST 1

/* The master's bits are 65536 times the weight's plus the remainder. A negative one under a zero is outdated. */
static inline float join(bf16 weight, int16_t remainder) {
  int32_t rest = (weight & 0x7fff) == 0 && remainder < 0 ? 0 : remainder;
  return float_of(((uint32_t)weight << 16) + (uint32_t)rest);
}
static inline int16_t remainder_of(float value) { return value != value ? 0 : (int16_t)bits_of(value); }
#define compact_READ(i) join(weight[i], rest[i])
#define compact_WRITE(i, o, value) rest[i] = remainder_of(value), (out)[o] = to_away(value)
#define compact_WRITE_ONLY 0
#define compact_HAS_REST 1

#define stochastic_READ(i) load_bf16(weight[i])
#define stochastic_WRITE(i, o, value) (out)[o] = to_either(value, mix((uint32_t)(first + i) ^ key))
#define stochastic_WRITE_ONLY 0
#define stochastic_HAS_REST 0

/* An error of more than half the distance to the next weight away from zero is that of an overwritten weight. */
static inline float with_error(bf16 weight, bf16 error) {
  float value = load_bf16(weight), rest = load_bf16(error), distance = load_bf16((bf16)(weight + 1)) - value;
  return value + (2 * fabsf(rest) <= fabsf(distance) ? rest : 0);
}
#define kahan_READ(i) with_error(weight[i], rest[i])
#define kahan_WRITE(i, o, value) (out)[o] = to_away(value), rest[i] = to_even((value) - load_bf16(to_away(value)))
#define kahan_WRITE_ONLY 0
#define kahan_HAS_REST 1

/* Moments. BEGIN and END surround a tile; `signed_` is 1 for the first moment and 0 for the second. */

typedef float fp32_moment;
typedef bf16 bf16_moment;
typedef code int8_moment;

#if STOCHASTIC_MOMENTS
#define DRAW(i) mix((uint32_t)(first + i) ^ key ^ MOMENT_NOISE)
#define ROUNDED(value, noise) to_either(value, noise)
#else
#define DRAW(i) 0
#define ROUNDED(value, noise) to_even(value)
#endif

#define fp32_BEGIN(from, to)
#define fp32_GET(moment, i, from, signed_) moment[i]
#define fp32_SET(moment, i, from, value, noise) moment[i] = (value)
#define fp32_KEEP(i, from, draw)
#define fp32_END(from, to)

#define bf16_BEGIN(from, to)
#define bf16_GET(moment, i, from, signed_) load_bf16(moment[i])
#define bf16_SET(moment, i, from, value, noise) moment[i] = ROUNDED(value, noise)
#define bf16_KEEP(i, from, draw)
#define bf16_END(from, to)

#if QUANTISED
#include "adamw_codes.h"
#endif
