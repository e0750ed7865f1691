// Sums of products of a few queries with the keys and the values of a cache, as they lie there.
//
// Shapes: Q queries, n slots of a cache that follow each other, d numbers of each.
#pragma once
#include <utility>
#include "vectors.h"

static inline Vec fold(Vec* a) {  // the sums of W vectors
#if WIDTH == 16
    for (int i = 0; i < 8; i++)
        a[i] = SHUFFLE(a[2*i], a[2*i+1], 0,1,2,3,4,5,6,7,16,17,18,19,20,21,22,23)
             + SHUFFLE(a[2*i], a[2*i+1], 8,9,10,11,12,13,14,15,24,25,26,27,28,29,30,31);
    for (int i = 0; i < 4; i++)
        a[i] = SHUFFLE(a[2*i], a[2*i+1], 0,1,2,3,8,9,10,11,16,17,18,19,24,25,26,27)
             + SHUFFLE(a[2*i], a[2*i+1], 4,5,6,7,12,13,14,15,20,21,22,23,28,29,30,31);
    for (int i = 0; i < 2; i++)
        a[i] = SHUFFLE(a[2*i], a[2*i+1], 0,1,4,5,8,9,12,13,16,17,20,21,24,25,28,29)
             + SHUFFLE(a[2*i], a[2*i+1], 2,3,6,7,10,11,14,15,18,19,22,23,26,27,30,31);
    return SHUFFLE(a[0], a[1], 0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30)
         + SHUFFLE(a[0], a[1], 1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31);
#else
    for (int i = 0; i < 4; i++)
        a[i] = SHUFFLE(a[2*i], a[2*i+1], 0,1,2,3,8,9,10,11) + SHUFFLE(a[2*i], a[2*i+1], 4,5,6,7,12,13,14,15);
    for (int i = 0; i < 2; i++)
        a[i] = SHUFFLE(a[2*i], a[2*i+1], 0,1,4,5,8,9,12,13) + SHUFFLE(a[2*i], a[2*i+1], 2,3,6,7,10,11,14,15);
    return SHUFFLE(a[0], a[1], 0,2,4,6,8,10,12,14) + SHUFFLE(a[0], a[1], 1,3,5,7,9,11,13,15);
#endif
}

template <int Q> static inline void copy_sums(const float* found, int64_t n, float* out, int64_t out_step) {  // the first n of W / Q
    constexpr int S = W / Q;
    for (int i = 0; i < Q; i++)
        if (n == S) std::memcpy(out + i * out_step, found + i * S, S * sizeof(float));
        else std::copy_n(found + i * S, n, out + i * out_step);
}

// out[i][s] = q[i] . k[s] of n rows k; q is padded with zeros to a multiple of W. Whole: d is such a multiple.
template <int Q, bool Whole, class T>
static __attribute__((noinline)) void dots(const float* q, int64_t q_step, const T* k, int64_t k_step, int64_t n, int64_t d,
                                           float* out, int64_t out_step) {
    constexpr int S = W / Q;
    for (int64_t s = 0; s < n; s += S) {
        const T* rows[S];
        for (int j = 0; j < S; j++) rows[j] = k + std::min(s + j, n - 1) * k_step;
        Vec a[W] = {};
        for (int64_t c = 0; c < d; c += W)
            for (int j = 0; j < S; j++) {
                Vec key = Whole ? load(rows[j] + c) : load(rows[j] + c, d - c);
                for (int i = 0; i < Q; i++) a[i * S + j] += key * load(q + i * q_step + c);
            }
        float found[W];
        store(found, fold(a));
        copy_sums<Q>(found, std::min<int64_t>(n - s, S), out + s, out_step);
    }
}

// acc + the products of 32 numbers, in pairs
static inline Vec add_products(Vec acc, const bfloat16* a, const bfloat16* b) {
#ifdef __AVX512BF16__
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_loadu_si512(b));
#else
    Bits x, y;
    std::memcpy(&x, a, sizeof x);
    std::memcpy(&y, b, sizeof y);
    return acc + (Vec)(x << 16) * (Vec)(y << 16) + (Vec)(x & 0xffff0000) * (Vec)(y & 0xffff0000);
#endif
}

// As dots, of bfloat16 rows whose length is a multiple of 2 W.
template <int Q>
static __attribute__((noinline)) void narrow_dots(const bfloat16* q, const bfloat16* k, int64_t n, int64_t d, float* out, int64_t out_step) {
    constexpr int S = W / Q;
    for (int64_t s = 0; s < n; s += S) {
        const bfloat16* rows[S];
        for (int j = 0; j < S; j++) rows[j] = k + std::min(s + j, n - 1) * d;
        Vec a[W] = {};
        for (int64_t c = 0; c < d; c += 2 * W)
            for (int j = 0; j < S; j++)
                for (int i = 0; i < Q; i++) a[i * S + j] = add_products(a[i * S + j], rows[j] + c, q + i * d + c);
        float found[W];
        store(found, fold(a));
        copy_sums<Q>(found, std::min<int64_t>(n - s, S), out + s, out_step);
    }
}

// out[i] += sum over s of w[i][s] v[s]; out is padded to a multiple of 2 W. `runs` calls f(s, v, n) for each n rows from
// s that follow each other. H: vectors of v together; Whole: d is a multiple of them.
template <int Q, int H, bool Whole, class T, class Runs>
static __attribute__((noinline)) void mix(const float* w, int64_t w_step, const Runs& runs, int64_t d, float* out, int64_t out_step) {
    for (int64_t c = 0; c < d; c += H * W) {
        Vec a[Q][H];
        for (int i = 0; i < Q; i++)
            for (int h = 0; h < H; h++) a[i][h] = load(out + i * out_step + c + h * W);
        runs([&](int64_t from, const T* v, int64_t n) {
            for (int64_t s = 0; s < n; s++)
                for (int h = 0; h < H; h++) {
                    const T* row = v + s * d + c + h * W;
                    Vec x = Whole ? load(row) : load(row, std::max<int64_t>(d - c - h * W, 0));
                    for (int i = 0; i < Q; i++) a[i][h] += w[i * w_step + from + s] * x;
                }
        });
        for (int i = 0; i < Q; i++)
            for (int h = 0; h < H; h++) store(out + i * out_step + c + h * W, a[i][h]);
    }
}

// As narrow_dots, of so many queries that it is less work to turn the keys round than to sum up vectors.
template <int Q>
static __attribute__((noinline)) void turned_dots(const bfloat16* q, const bfloat16* k, int64_t n, int64_t d, float* out, int64_t out_step) {
    for (int64_t s = 0; s < n; s += W) {
        Vec a[Q] = {};
        for (int64_t c = 0; c < d; c += 2 * W) {
            Vec pairs[W];
            for (int j = 0; j < W; j++) std::memcpy(&pairs[j], k + std::min(s + j, n - 1) * d + c, sizeof(Vec));
            transpose(pairs);
            for (int j = 0; j < W; j++)
                for (int i = 0; i < Q; i++) a[i] = add_pair(a[i], q + i * d + c + 2 * j, (Bits)pairs[j]);
        }
        for (int i = 0; i < Q; i++) store(out + i * out_step + s, a[i], n - s);
    }
}

// As mix, of bfloat16 weights and rows whose length is a multiple of 2 W. After a run's last weight lies a finite number.
template <int Q, int H, class Runs>
static __attribute__((noinline)) void narrow_mix(const bfloat16* w, int64_t w_step, const Runs& runs, int64_t d, float* out, int64_t out_step) {
    for (int64_t c = 0; c < d; c += 2 * H * W) {
        Vec even[Q][H] = {}, odd[Q][H] = {};  // columns
        runs([&](int64_t from, const bfloat16* v, int64_t n) {
            for (int64_t s = 0; s < n; s += 2)
                for (int h = 0; h < H; h++) {
                    const bfloat16* row = v + s * d + c + h * 2 * W;
                    const Bits first = load_pairs(row), second = s + 1 < n ? load_pairs(row + d) : Bits{};
                    const Bits low = (first & 0xffff) | second << 16, high = first >> 16 | (second & 0xffff0000);
                    for (int i = 0; i < Q; i++) {
                        even[i][h] = add_pair(even[i][h], w + i * w_step + from + s, low);
                        odd[i][h] = add_pair(odd[i][h], w + i * w_step + from + s, high);
                    }
                }
        });
        for (int i = 0; i < Q; i++)
            for (int h = 0; h < H; h++) {
                float* own = out + i * out_step + c + h * 2 * W;
                store(own, load(own) + SHUFFLE(even[i][h], odd[i][h], LOW_HALVES));
                store(own + W, load(own + W) + SHUFFLE(even[i][h], odd[i][h], HIGH_HALVES));
            }
    }
}

template <class F> static void by_queries(int64_t queries, F f) {  // f(first, how many as a constant)
    constexpr int MOST = W / 2;  // whose sums fit into the registers
    int64_t at = 0;
    for (; queries - at >= MOST; at += MOST) f(at, std::integral_constant<int, MOST>());
    if (MOST > 4 && queries - at >= 4) f(at, std::integral_constant<int, 4>()), at += 4;
    if (queries - at >= 2) f(at, std::integral_constant<int, 2>()), at += 2;
    if (queries - at >= 1) f(at, std::integral_constant<int, 1>());
}

template <class T> static void all_dots(int64_t queries, const float* q, int64_t q_step, const T* k, int64_t n, int64_t d, float* out, int64_t out_step) {
    by_queries(queries, [&](int64_t i, auto size) {
        constexpr int Q = decltype(size)::value;
        (d % W ? dots<Q, false, T> : dots<Q, true, T>)(q + i * q_step, q_step, k, d, n, d, out + i * out_step, out_step);
    });
}

template <class T, class Runs> static void all_mix(int64_t queries, const float* w, int64_t w_step, const Runs& runs, int64_t d, float* out, int64_t out_step) {
    by_queries(queries, [&](int64_t i, auto size) {
        constexpr int Q = decltype(size)::value, H = Q > 2 ? 2 : Q == 1 && W == 8 ? 8 : 4;  // eight sums at least: each waits for the one before
        const auto mixed = d % (2 * W) ? mix<Q, 2, false, T, Runs> : d % (H * W) ? mix<Q, 2, true, T, Runs> : mix<Q, H, true, T, Runs>;
        mixed(w + i * w_step, w_step, runs, d, out + i * out_step, out_step);
    });
}

// The same of queries and weights of bfloat16
static void all_dots(int64_t queries, const bfloat16* q, int64_t, const bfloat16* k, int64_t n, int64_t d, float* out, int64_t out_step) {
    by_queries(queries, [&](int64_t i, auto size) {
        constexpr int Q = decltype(size)::value;
        (Q < W / 2 ? narrow_dots<Q> : turned_dots<Q>)(q + i * d, k, n, d, out + i * out_step, out_step);
    });
}

template <class T, class Runs> static void all_mix(int64_t queries, const bfloat16* w, int64_t w_step, const Runs& runs, int64_t d, float* out, int64_t out_step) {
    by_queries(queries, [&](int64_t i, auto size) {
        constexpr int Q = decltype(size)::value, H = Q > 4 ? 1 : 2;
        (d % (2 * H * W) ? narrow_mix<Q, 1, Runs> : narrow_mix<Q, H, Runs>)(w + i * w_step, w_step, runs, d, out + i * out_step, out_step);
    });
}
