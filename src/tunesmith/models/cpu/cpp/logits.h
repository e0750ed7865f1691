// Rows of float32 logits [c, v] of a head, each read twice while it is in the cache.
#pragma once
#include "vectors.h"

struct LogitSlopes { const float *constant, *slope, *at_token; const int64_t* token; };  // [c]; slope may be null

// f(W logits from c, -inf beyond the last, the place of a sum) for all of a row: four sums do not wait for each other.
template <class F> static inline void by_logits(const float* z, int64_t v, F f) {
    int64_t c = 0;
    for (; c + 4 * W <= v; c += 4 * W)
        for (int i = 0; i < 4; i++) f(load(z + c + i * W), i);
    for (; c < v; c += W) {
        Vec x = load(z + c, v - c);
        for (int64_t i = v - c; i < W; i++) x[i] = -INFINITY;
        f(x, 0);
    }
}

// The log-sum-exp of a row, and where it is wanted the entropy of its softmax.
static void sum_logits(const float* z, int64_t v, float* total, float* entropy) {
    Vec tops[4], sums[4] = {}, products[4] = {};
    for (Vec& top : tops) top = Vec{} - INFINITY;
    by_logits(z, v, [&](Vec x, int i) { tops[i] = x > tops[i] ? x : tops[i]; });
    float top = tops[0][0];
    for (const Vec& each : tops)
        for (int i = 0; i < W; i++) top = each[i] > top ? each[i] : top;
    by_logits(z, v, [&](Vec x, int i) {
        const Vec below = x - top, weight = exponential(below);
        sums[i] += weight;
        if (entropy) products[i] += weight * (below < LEAST ? Vec{} : below);
    });
    const float whole = sum((sums[0] + sums[1]) + (sums[2] + sums[3])), log = std::log(whole);
    *total = top + log;
    if (entropy) *entropy = log - sum((products[0] + products[1]) + (products[2] + products[3])) / whole;
}

// The gradient of a row, over its logits; see `RowGradient`.
static void logits_gradient(float* z, int64_t v, float total, const LogitSlopes& of, int64_t row) {
    const float constant = of.constant[row], slope = of.slope ? of.slope[row] : 0;
    for (int64_t c = 0; c < v; c += W) {
        const Vec log = load(z + c, v - c) - total, p = exponential(log);
        store(z + c, p * (of.slope ? constant + slope * (log < LEAST ? Vec{} : log) : Vec{} + constant), v - c);
    }
    z[of.token[row]] += of.at_token[row];
}
