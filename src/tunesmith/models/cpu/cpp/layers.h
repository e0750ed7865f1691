// What training passes of a layer compute beside products and attention, each in one pass over rows of float32 or bfloat16
// (X); all else is float32. `*_step` is from a row to the next; rows are whole otherwise.
//
// Shapes: T rows; d their numbers; H query heads, K key/value heads, D head size; f feed-forward size.
#pragma once
#include "vectors.h"

template <class X> static inline Vec rounded(Vec v) {  // as a row keeps it
    if constexpr (std::is_same_v<X, float>) return v;
    else return (Vec)(__builtin_convertvector(narrow(v), Bits) << 16);
}

template <class X> struct Norm { const X* weight; float eps; int64_t offset; };  // offset: the weight is an offset from one

template <class X> static inline Vec weight_at(const Norm<X>& norm, int64_t c, int64_t n) {
    const Vec w = load(norm.weight + c, n);
    return norm.offset ? w + 1.f : w;
}

// Normalized, and rounded before the weight is applied unless it is an offset.
template <class X> static inline Vec normalized(const Norm<X>& norm, Vec x, float scale, int64_t c, int64_t n) {
    return (norm.offset ? x * scale : rounded<X>(x * scale)) * weight_at(norm, c, n);
}

template <class X> static inline float inverse_rms(const X* x, int64_t d, float eps) {
    Vec squares = {};
    for (int64_t c = 0; c < d; c += W) { const Vec v = load(x + c, d - c); squares += v * v; }
    return 1.f / std::sqrt(sum(squares) / d + eps);
}

template <class X>
static void norm_rows(int64_t T, int64_t d, const X* x, int64_t x_step, const Norm<X>& norm, X* y, float* scales, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (T * d > ALONE)
    for (int64_t t = 0; t < T; t++) {
        const X* row = x + t * x_step;
        const float scale = inverse_rms(row, d, norm.eps);
        for (int64_t c = 0; c < d; c += W) store(y + t * d + c, normalized(norm, load(row + c, d - c), scale, c, d - c), d - c);
        if (scales) scales[t] = scale;
    }
}

// The gradient of a row x from that of its norm; adds to the weight's [d].
template <class X, class G>
static void norm_row_backward(int64_t d, const X* x, const G* grad, const Norm<X>& norm, float scale, X* grad_x, float* grad_weight) {
    Vec product = {};
    for (int64_t c = 0; c < d; c += W) {
        const Vec unit = load(x + c, d - c) * scale, g = load(grad + c, d - c);
        product += g * weight_at(norm, c, d - c) * unit;
        if (grad_weight) store(grad_weight + c, load(grad_weight + c, d - c) + unit * g, d - c);
    }
    const float mean = sum(product) / d;
    for (int64_t c = 0; c < d; c += W) {
        const Vec unit = load(x + c, d - c) * scale, inner = load(grad + c, d - c) * weight_at(norm, c, d - c);
        store(grad_x + c, (inner - unit * mean) * scale, d - c);
    }
}

// Runs row(t, own) for all rows on threads. Each has sums of its own [n], which are added up in the threads' order.
template <class F> static void by_rows(int64_t T, int64_t n, float* sums, bool alone, int64_t threads, F row) {
    const int64_t team = alone ? 1 : threads, step = (n + W - 1) / W * W;
    std::vector<float> all(sums ? team * step : 0);
#pragma omp parallel for num_threads(team) schedule(static)
    for (int64_t part = 0; part < team; part++)
        for (int64_t t = T * part / team; t < T * (part + 1) / team; t++) row(t, sums ? all.data() + part * step : nullptr);
    for (int64_t i = 0; sums && i < n; i++) {
        sums[i] = 0;
        for (int64_t part = 0; part < team; part++) sums[i] += all[part * step + i];
    }
}

template <class X>
static void norm_rows_backward(int64_t T, int64_t d, const X* x, int64_t x_step, const X* grad, int64_t grad_step, const Norm<X>& norm, const float* scales, X* grad_x, float* grad_weight, int64_t threads) {
    by_rows(T, d, grad_weight, T * d <= ALONE, threads, [&](int64_t t, float* own) {
        norm_row_backward(d, x + t * x_step, grad + t * grad_step, norm, scales[t], grad_x + t * d, own);
    });
}

// Queries, keys and values of a product [T, (H + 2 K) D]; norms of queries and keys, if there are some, come before rotation.
// sin has its first half negated.
template <class X> struct Heads {
    using Number = X;
    const X *x, *cos, *sin;  // cos, sin: [T, D]
    const Norm<X>* norms;    // of queries and of keys, or null
    int64_t T, x_step, H, K, D;
};

template <class X> static void turn_heads(const Heads<X>& a, X* q, X* k, float* scales, int64_t threads) {
    const int64_t D = a.D, half = D / 2, count = a.H + a.K;
#pragma omp parallel for num_threads(threads) if (a.T * count * D > ALONE)
    for (int64_t t = 0; t < a.T; t++)
        for (int64_t h = 0; h < count; h++) {
            const X *x = a.x + t * a.x_step + h * D, *cos = a.cos + t * D, *sin = a.sin + t * D;
            X* out = h < a.H ? q + (t * a.H + h) * D : k + (t * a.K + h - a.H) * D;
            const Norm<X>* norm = a.norms ? a.norms + (h >= a.H) : nullptr;
            const float scale = norm ? inverse_rms(x, D, norm->eps) : 1.f;
            if (norm && scales) scales[t * count + h] = scale;
            for (int64_t c = 0; c < half; c += W) {
                const int64_t n = half - c, far = c + half;
                Vec a1 = load(x + c, n), a2 = load(x + far, n);
                if (norm) a1 = rounded<X>(normalized(*norm, a1, scale, c, n)), a2 = rounded<X>(normalized(*norm, a2, scale, far, n));
                store(out + c, a1 * load(cos + c, n) + a2 * load(sin + c, n), n);
                store(out + far, a2 * load(cos + far, n) + a1 * load(sin + far, n), n);
            }
        }
}

// grad_x [T, (H + 2 K) D]; grad_weights [2, D], of the norms of queries and keys, or null.
template <class X>
static void turn_heads_backward(const Heads<X>& a, const X* const* grads, const int64_t* steps, const float* scales, X* grad_x, float* grad_weights, int64_t threads) {
    const int64_t D = a.D, half = D / 2, count = a.H + a.K;
    by_rows(a.T, 2 * D, grad_weights, a.T * count * D <= ALONE, threads, [&](int64_t t, float* own) {
        static thread_local std::vector<float> memory;
        memory.resize(D);
        float* turned = memory.data();
        X* row = grad_x + t * (count + a.K) * D;
        const X *cos = a.cos + t * D, *sin = a.sin + t * D;
        for (int64_t h = 0; h < count; h++) {
            const bool key = h >= a.H;
            const X* g = grads[key] + t * steps[key] + (key ? h - a.H : h) * D;
            for (int64_t c = 0; c < half; c += W) {
                const int64_t n = half - c, far = c + half;
                const Vec g1 = load(g + c, n), g2 = load(g + far, n);
                store(turned + c, g1 * load(cos + c, n) + g2 * load(sin + far, n), n);
                store(turned + far, g2 * load(cos + far, n) + g1 * load(sin + c, n), n);
            }
            if (a.norms)
                norm_row_backward(D, a.x + t * a.x_step + h * D, turned, a.norms[key], scales[t * count + h], row + h * D, own ? own + key * D : nullptr);
            else
                for (int64_t c = 0; c < D; c += W) store(row + h * D + c, load(turned + c, D - c), D - c);
        }
        std::memcpy(row + count * D, grads[2] + t * steps[2], a.K * D * sizeof(X));
    });
}

// silu(gate) * up of x [T, 2 f], gate first.
template <class X> static void gate_rows(int64_t T, int64_t f, const X* x, int64_t x_step, X* y, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (T * f > ALONE)
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < f; c += W) {
            const X* at = x + t * x_step + c;
            const Vec gate = load(at, f - c);
            store(y + t * f + c, gate / (1.f + exponential(-gate)) * load(at + f, f - c), f - c);
        }
}

template <class X>
static void gate_rows_backward(int64_t T, int64_t f, const X* x, int64_t x_step, const X* grad, int64_t grad_step, X* grad_x, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (T * f > ALONE)
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < f; c += W) {
            const X* at = x + t * x_step + c;
            const Vec gate = load(at, f - c), up = load(at + f, f - c), g = load(grad + t * grad_step + c, f - c);
            const Vec share = 1.f / (1.f + exponential(-gate)), active = gate * share;
            store(grad_x + t * 2 * f + c, g * up * (share + active * (1.f - share)), f - c);
            store(grad_x + t * 2 * f + f + c, g * active, f - c);
        }
}
