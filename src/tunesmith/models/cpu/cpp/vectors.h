// Vectors of W numbers, in memory of 32, 16 or 8 bits, and AMX's tiles.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __AVX512F__
#define WIDTH 16  // 32 registers of 16 numbers
#else
#define WIDTH 8   // 16 registers of 8 numbers (AVX2), or 32 of 4 in pairs (NEON)
#endif
constexpr int W = WIDTH;             // numbers in a vector
typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Int __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Half __attribute__((vector_size(2 * WIDTH)));
struct bfloat16 { uint16_t bits; };
struct float16 { uint16_t bits; };
constexpr int64_t ALONE = 1 << 15;   // multiplications that one thread does as fast as a team
constexpr float LEAST = -87.3f;      // below it, exp is 0

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Int){__VA_ARGS__})
#endif

static inline Vec load(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
static inline Vec load(const bfloat16* p) {
    Half h; std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, Bits) << 16);
}
static inline Vec load(const float16* p) {
#if WIDTH == 16
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__) && defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__ARM_FP16_FORMAT_IEEE)
    typedef __fp16 Sixteen __attribute__((vector_size(2 * WIDTH)));
    Sixteen h; std::memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, Vec);
#else
    Half h; std::memcpy(&h, p, sizeof h);
    const Bits u = __builtin_convertvector(h, Bits);
    const Bits value = (Bits)((Vec)((u & 0x7fff) << 13) * 0x1p112f), no_number = (u & 0x7fff) << 13 | 0x7f800000;
    return (Vec)(((u & 0x7c00) == 0x7c00 ? no_number : value) | (u & 0x8000) << 16);
#endif
}
static inline Vec load(const int8_t* p) {
#if WIDTH == 16
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    Bytes b; std::memcpy(&b, p, sizeof b);
    return __builtin_convertvector(b, Vec);
#endif
}
static inline Half narrow(Vec v) {  // to the nearest, ties to even; NaN stays NaN
#ifdef __AVX512BF16__
    return (Half)_mm512_cvtneps_pbh((__m512)v);
#else
    Bits u = (Bits)v, rounded = u + 0x7fff + ((u >> 16) & 1);
    return __builtin_convertvector((v == v ? rounded : u | 0x400000) >> 16, Half);
#endif
}
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
static inline void store(bfloat16* p, Vec v) { const Half h = narrow(v); std::memcpy(p, &h, sizeof h); }
static inline void store(float16* p, Vec v) {  // to the nearest, ties to even; NaN stays NaN
#if WIDTH == 16
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, 0));
#elif defined(__F16C__) && defined(__AVX2__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0));
#elif defined(__ARM_FP16_FORMAT_IEEE)
    typedef __fp16 Sixteen __attribute__((vector_size(2 * WIDTH)));
    const Sixteen h = __builtin_convertvector(v, Sixteen); std::memcpy(p, &h, sizeof h);
#else
    const Bits u = (Bits)v, size = u & 0x7fffffff, infinite = Bits{} + 0x7c00, no_number = Bits{} + 0x7e00;
    const Bits tiny = (Bits)((Vec)size + 0.5f) - 0x3f000000, usual = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    const Bits finite = size < 0x38800000 ? tiny : usual;
    const Half h = __builtin_convertvector((size > 0x7f800000 ? no_number : size >= 0x477ff000 ? infinite : finite) | (u >> 16 & 0x8000), Half);
    std::memcpy(p, &h, sizeof h);
#endif
}
static inline void store(int8_t* p, Vec v) {  // of whole numbers
    typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    const Bytes b = __builtin_convertvector(__builtin_convertvector(v, Int), Bytes); std::memcpy(p, &b, sizeof b);
}
template <class T> static inline Vec load(const T* p, int64_t n) {  // the first n numbers, then zeros
    if (n >= W) return load(p);
    T part[W] = {};
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T> static inline void store(T* p, Vec v, int64_t n) {
    if (n >= W) return store(p, v);
    T part[W];
    store(part, v);
    std::memcpy(p, part, n * sizeof(T));
}
static inline Vec fused(Vec a, Vec b, Vec c) {  // a b + c, rounded alike whatever the compiler makes of the code around it
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    for (int i = 0; i < W; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}
static inline float as_float(float x) { return x; }
static inline float as_float(bfloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}
// Memory for so many numbers, whatever they are: growing by zeros each time would take as long as some of the work.
template <class T> static T* room(std::vector<T>& memory, int64_t size) {
    if ((int64_t)memory.size() < size) memory.resize(size);
    return memory.data();
}
static inline float sum(Vec v) {
    float part[W];
    store(part, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

// Products read them from registers. A compiler may load them again for each product, but a core loads no more vectors than it
// multiplies: products of three or four rows then take twice as long.
template <class V> static inline void in_registers(V& a, V& b) {
#ifdef __AVX2__
    asm("" : "+v"(a), "+v"(b));
#endif
}

#ifdef __AVX512BF16__
constexpr bool MULTIPLIES_PAIRS = true;  // of bfloat16, without widening them
#else
constexpr bool MULTIPLIES_PAIRS = false;
#endif
static inline Bits load_pairs(const bfloat16* p) { Bits pairs; std::memcpy(&pairs, p, sizeof pairs); return pairs; }
// acc + the products of two numbers x and W pairs
static inline Vec add_pair(Vec acc, const bfloat16* x, Bits w) {
    uint32_t two;
    std::memcpy(&two, x, sizeof two);
#ifdef __AVX512BF16__
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(two));
#else
    const Bits inputs = Bits{} + two;
    return acc + (Vec)(w << 16) * (Vec)(inputs << 16) + (Vec)(w & 0xffff0000) * (Vec)(inputs & 0xffff0000);
#endif
}

static inline Vec nearest(Vec x) { return (x + 12582912.f) - 12582912.f; }  // whole number of less than 2^22; ties to even
static inline Vec exponential(Vec x) {  // error below 2e-7 of the result; NaN stays NaN
    Vec scaled = x * 1.44269504f, bounded = scaled < -126.f ? Vec{} - 126.f : scaled > 127.f ? Vec{} + 127.f : scaled;
    Vec whole = nearest(bounded);
    Vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vec y = 1.f + r + r * r * (0.5f + r * (1.6666665459e-1f + r * (4.1665795894e-2f + r * (8.3334519073e-3f
          + r * (1.3981999507e-3f + r * 1.9875691500e-4f)))));
    y *= (Vec)((__builtin_convertvector(whole, Int) + 127) << 23);
    return x < LEAST ? Vec{} : x > 88.7f ? Vec{} + INFINITY : y;
}
static inline Vec hyperbolic_tangent(Vec x) { return 1.f - 2.f / (exponential(2.f * x) + 1.f); }

#if WIDTH == 16
#define LOW_HALVES 0,16,1,17,2,18,3,19,4,20,5,21,6,22,7,23
#define HIGH_HALVES 8,24,9,25,10,26,11,27,12,28,13,29,14,30,15,31
#else
#define LOW_HALVES 0,8,1,9,2,10,3,11
#define HIGH_HALVES 4,12,5,13,6,14,7,15
#endif
static inline void transpose(Vec* a) {  // W x W: each round moves a bit of the row's number to the column's
    for (int bit = 1; bit < W; bit *= 2) {
        Vec b[W];
        for (int i = 0; i < W / 2; i++) {
            b[2*i] = SHUFFLE(a[i], a[i+W/2], LOW_HALVES);
            b[2*i+1] = SHUFFLE(a[i], a[i+W/2], HIGH_HALVES);
        }
        std::memcpy(a, b, sizeof b);
    }
}

#ifdef __AMX_BF16__
static bool has_tiles() {  // Linux lets a process use them when it has asked
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

// Eight tiles of 16 rows of 64 bytes.
static void configure_tiles() {
    struct { uint8_t palette = 1, start = 0, reserved[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } shape;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
    _tile_loadconfig(&shape);
}
static void release_tiles() { _tile_release(); }
#else
static inline void configure_tiles() {}
static inline void release_tiles() {}
#endif
