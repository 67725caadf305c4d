/* Moments of 8 bits on processors that permute bytes (AVX-512 VBMI): the codes and numbers of adamw_codes.h, without
   gathers and without divisions.

   A table of 256 entries is kept as planes, one for each byte of an entry, so that permutations look up 64 numbers at
   once. A code is found as a guess that is right or one too small, and one comparison of all bits with the boundary
   above the guess. Guesses are straight lines over bins, of the first bits of a number. native_codes.py makes the
   tables, and refuses maps whose codes no line guesses so.

   Quotients are taken 2^64 times too large, and so are the boundaries, so that none becomes 0 or loses bits. */

#include <immintrin.h>

#define GROUP 64
#define GROUPS (TILE / GROUP)
#define VBMI static inline __attribute__((always_inline))
#define EACH_GROUP for (int g = 0; g < GROUPS; g++)
#define EACH_HALF for (int h = 0; h < 2; h++)

typedef uint8_t plane[MAP_SIZE];

/* `map` has the map. A number's bin is the 8 bits from its exponent's lower 5 on: `line` is the guess at a bin's
   beginning and the line's slope. The line begins GUESS_BEGINS 256ths above that guess, and rises by as many 256ths as
   its slope in each of 16 places. `edge` is the boundary above a guess. With noise, `here` is the map at the lower
   entry's magnitude; `beyond` is the map at the next one, but of unsigned numbers what lies between the two. */
static struct {
  plane map[4], line[2], edge[4], here[4], beyond[4];
} tables[2] LINES;

/* Dwords of 64 bytes in the order in which packing four vectors of 32 bits would bring their bytes. */
static const int32_t packed[16] LINES = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
/* Upper words of two vectors of 32 bits, in the order of packing them. */
static const int16_t upper_words[32] LINES = {1,  3,  5,  7,  33, 35, 37, 39, 9,  11, 13, 15, 41, 43, 45, 47,
                                              17, 19, 21, 23, 49, 51, 53, 55, 25, 27, 29, 31, 57, 59, 61, 63};

/* Parts of 64 bytes. Indices of signed numbers are below 128, which saves half of the permutations. */
VBMI void load(plane *planes, int count, int below_128, __m512i table[][4]) {
  for (int p = 0; p < count; p++)
    for (int q = 0; q < (below_128 ? 2 : 4); q++) table[p][q] = _mm512_load_si512(planes[p] + GROUP * q);
}

VBMI void look_up_bytes(__m512i table[][4], int count, int below_128, __m512i index, __m512i *found) {
  __mmask64 is_upper = below_128 ? 0 : _mm512_movepi8_mask(index);
  for (int p = 0; p < count; p++) {
    found[p] = _mm512_permutex2var_epi8(table[p][0], index, table[p][1]);
    if (!below_128)
      found[p] = _mm512_mask_blend_epi8(is_upper, found[p],
                                        _mm512_permutex2var_epi8(table[p][2], index, table[p][3]));
  }
}

/* Half `h` of the words whose bytes are in two planes. */
VBMI __m512i joined(__m512i low, __m512i high, int h) {
  return h ? _mm512_unpackhi_epi8(low, high) : _mm512_unpacklo_epi8(low, high);
}

/* Looks up 64 floats, of whose index the bytes are in the order of packing. */
VBMI void look_up(__m512i table[4][4], int below_128, __m512i index, __m512 found[4]) {
  __m512i part[4];
  look_up_bytes(table, 4, below_128, index, part);
  EACH_HALF {
    __m512i low = joined(part[0], part[1], h), high = joined(part[2], part[3], h);
    found[2 * h] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high));
    found[2 * h + 1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high));
  }
}

VBMI __mmask64 first(int64_t count) { return count < GROUP ? ~0ull >> (GROUP - count) : ~0ull; }

/* Writes whole groups of `values`. */
VBMI void decode(const code *codes, float scale, float *values, int64_t count, int kind) {
  __m512i order = _mm512_load_si512(packed), map[4][4];
  load(tables[kind].map, 4, 0, map);
  for (int64_t i = 0; i < count; i += GROUP) {
    __m512i index = _mm512_permutexvar_epi32(order, _mm512_maskz_loadu_epi8(first(count - i), codes + i));
    __m512 found[4];
    look_up(map, 0, index, found);
    for (int j = 0; j < 4; j++)
      _mm512_storeu_ps(values + i + 16 * j, _mm512_mul_ps(found[j], _mm512_set1_ps(scale)));
  }
}

#if STOCHASTIC_MOMENTS
/* -1 for the numbers that go from their lower entry to the next, else 0, in words. */
VBMI void draw_upper(const __m512i bits[4], __m512i index, const uint32_t *draws, int kind, __m512i upper[2]) {
  __m512 here[4], beyond[4];
  __m512i taken[4], table[4][4];
  load(tables[kind].here, 4, !kind, table);
  look_up(table, !kind, index, here);
  load(tables[kind].beyond, 4, !kind, table);
  look_up(table, !kind, index, beyond);
  for (int j = 0; j < 4; j++) {
    __m512 size = _mm512_abs_ps(_mm512_castsi512_ps(bits[j])), above = _mm512_sub_ps(size, here[j]);
    __m512 width = kind ? beyond[j] : _mm512_sub_ps(beyond[j], here[j]);
    if (!kind) above = _mm512_mask_sub_ps(above, _mm512_movepi32_mask(bits[j]), beyond[j], size);
    __m512i draw = _mm512_loadu_si512(draws + 16 * j);
    draw = kind ? _mm512_srli_epi32(draw, 16) : _mm512_and_si512(draw, _mm512_set1_epi32(0xffff));
    __m512 least = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(draw), _mm512_set1_ps(0x1p-16f)), width);
    /* A division rounds quotients of at most 2^-150 to 0. */
    if (!kind) least = _mm512_max_ps(least, _mm512_set1_ps(0x1p-86f));
    taken[j] = _mm512_movm_epi32(_mm512_cmp_ps_mask(above, least, _CMP_GT_OQ));
  }
  EACH_HALF upper[h] = _mm512_packs_epi32(taken[2 * h], taken[2 * h + 1]);
}
#endif

/* A quotient of numbers is a product with the inverse, and a correction by its remainder, which is exact: the result is
   that of a division, bit for bit. (Markstein 1990, "Computation of elementary functions on the IBM RISC System/6000
   processor", for a first quotient within one unit; that this one suffices was found by trying the quotients that come
   nearest to a boundary of rounding, 87 million, with every divisor's mantissa.) */
VBMI __m512 quotient(__m512 value, __m512 divisor, __m512 inverse) {
  __m512 near = _mm512_mul_ps(value, inverse);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(near, divisor, value), inverse, near);
}

/* Each step takes all groups: one group's steps depend on each other, and would leave the processor waiting. */
VBMI void encode_tile(const float *values, float divisor, float reciprocal, const uint32_t *draws, code *codes,
                      int64_t count, int kind) {
  const __m512i order = _mm512_load_si512(packed), upper = _mm512_load_si512(upper_words);
  const __m512i lower = _mm512_sub_epi16(upper, _mm512_set1_epi16(1)), one = _mm512_set1_epi16(1);
  const __m512 by = _mm512_set1_ps(divisor), inverse = _mm512_set1_ps(reciprocal);
  __m512i bits[GROUPS][4], high[GROUPS][2], low[GROUPS][2], entry[GROUPS][2], part[GROUPS][4];
  __m512i line[2][4], edge[4][4];
  __mmask32 negative[GROUPS][2];
  (void)draws;
  EACH_GROUP {
    for (int j = 0; j < 4; j++)
      bits[g][j] = _mm512_castps_si512(quotient(_mm512_loadu_ps(values + GROUP * g + 16 * j), by, inverse));
    EACH_HALF {
      high[g][h] = _mm512_permutex2var_epi16(bits[g][2 * h], upper, bits[g][2 * h + 1]);
      low[g][h] = _mm512_permutex2var_epi16(bits[g][2 * h], lower, bits[g][2 * h + 1]);
      negative[g][h] = kind ? 0 : _mm512_movepi16_mask(high[g][h]);
      if (!kind) high[g][h] = _mm512_and_si512(high[g][h], _mm512_set1_epi16(0x7fff));
      /* A negative number that equals a boundary gets the code further from 0. No boundary ends in 0xffff. */
      if (!STOCHASTIC_MOMENTS) low[g][h] = _mm512_mask_adds_epu16(low[g][h], negative[g][h], low[g][h], one);
    }
  }
  load(tables[kind].line, 2, 0, line);
  EACH_GROUP {
    __m512i place[2];
    EACH_HALF place[h] = _mm512_subs_epu16(high[g][h], _mm512_set1_epi16(0x5000)); /* 2^-31, enlarged */
    __m512i bin = _mm512_packus_epi16(_mm512_srli_epi16(place[0], 4), _mm512_srli_epi16(place[1], 4));
    look_up_bytes(line, 2, 0, bin, part[g]);
    EACH_HALF {
      __m512i begin = joined(_mm512_set1_epi8(GUESS_BEGINS), part[g][0], h);
      __m512i slope = joined(part[g][1], _mm512_setzero_si512(), h);
      __m512i rise = _mm512_mullo_epi16(slope, _mm512_and_si512(place[h], _mm512_set1_epi16(15)));
      entry[g][h] = _mm512_srli_epi16(_mm512_add_epi16(begin, rise), 8);
    }
  }
  load(tables[kind].edge, 4, !kind, edge);
  EACH_GROUP {
    look_up_bytes(edge, 4, !kind, _mm512_packus_epi16(entry[g][0], entry[g][1]), part[g]);
    EACH_HALF {
      __m512i low_edge = joined(part[g][0], part[g][1], h), high_edge = joined(part[g][2], part[g][3], h);
      __mmask32 equal = _mm512_cmpeq_epi16_mask(high[g][h], high_edge);
      __mmask32 over = STOCHASTIC_MOMENTS ? _mm512_mask_cmpge_epu16_mask(equal, low[g][h], low_edge)
                                          : _mm512_mask_cmpgt_epu16_mask(equal, low[g][h], low_edge);
      over |= _mm512_cmpgt_epu16_mask(high[g][h], high_edge);
      entry[g][h] = _mm512_mask_add_epi16(entry[g][h], over, entry[g][h], one);
    }
  }
  EACH_GROUP {
#if STOCHASTIC_MOMENTS
    __m512i taken[2];
    draw_upper(bits[g], _mm512_packus_epi16(entry[g][0], entry[g][1]), draws + GROUP * g, kind, taken);
    EACH_HALF {
      /* A negative number's lower entry is the one that is further from 0. */
      __m512i down = _mm512_add_epi16(entry[g][h], _mm512_add_epi16(taken[h], one));
      entry[g][h] = _mm512_mask_mov_epi16(_mm512_sub_epi16(entry[g][h], taken[h]), negative[g][h], down);
    }
#endif
    if (!kind)
      EACH_HALF {
        __m512i zero = _mm512_set1_epi16(127);
        entry[g][h] = _mm512_mask_sub_epi16(_mm512_add_epi16(zero, entry[g][h]), negative[g][h], zero, entry[g][h]);
      }
    __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(entry[g][0], entry[g][1]));
    int64_t left = count - GROUP * g;
    if (left > 0) _mm512_mask_storeu_epi8(codes + GROUP * g, first(left), bytes);
  }
}

/* Outside these bounds of the divisor a remainder could be too small for a float, or a quotient too small. */
VBMI void encode(const float *values, int is_finite, float divisor, float inverse, const uint32_t *draws, code *codes,
                 int64_t count, int kind) {
  if (is_finite && divisor >= 0x1p-60f && divisor <= 0x1p20f)
    encode_tile(values, divisor * 0x1p-64f, inverse * 0x1p64f, draws, codes, count, kind);
  else
    encode_plainly(values, divisor, draws, codes, count, kind);
}
