// The kernels of models/cpu/cpp that need no PyTorch, beside sums in double: prints each that is off, and fails if any is.
#include <cstdio>
#include <random>
#include "layers.h"
#include "products.h"

static std::mt19937 generator(0);
static int failed = 0;

static float wide(float x) { return x; }
static float wide(bfloat16 x) { return as_float(x); }

template <class X> static std::vector<X> drawn(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<X> out(n + W);
    for (X& x : out) { Vec v = Vec{} + normal(generator); store(&x, v, 1); }
    return out;
}

// Largest difference, beside the largest number of the reference.
template <class X> static void check(const char* name, const std::vector<X>& found, const std::vector<double>& exact, double roundings = 2) {
    const double unit = sizeof(X) == 2 ? 1. / 256 : 1. / (1 << 18);
    double most = 0, off = 0;
    for (double e : exact) most = std::max(most, std::abs(e));
    for (size_t i = 0; i < exact.size(); i++) off = std::max(off, std::abs(wide(found[i]) - exact[i]));
    if (off <= roundings * unit * most) return;
    std::printf("%s of %zu bytes: off by %g of %g\n", name, sizeof(X), off, most);
    failed = 1;
}

template <class X> static void norms(int64_t T, int64_t d) {
    const auto x = drawn<X>(T * d), weight = drawn<X>(d), grad = drawn<X>(T * d);
    std::vector<X> y(T * d + W), grad_x(T * d + W);
    std::vector<float> scales(T), grad_weight(d + W);
    const Norm<X> norm{weight.data(), 1e-6f, 1};
    norm_rows(T, d, x.data(), d, norm, y.data(), scales.data(), 1);
    norm_rows_backward(T, d, x.data(), d, grad.data(), d, norm, scales.data(), grad_x.data(), grad_weight.data(), 2);
    std::vector<double> out(T * d), back(T * d), sums(d);
    for (int64_t t = 0; t < T; t++) {
        double squares = 0, product = 0;
        for (int64_t c = 0; c < d; c++) squares += double(wide(x[t * d + c])) * wide(x[t * d + c]);
        const double scale = 1 / std::sqrt(squares / d + 1e-6);
        for (int64_t c = 0; c < d; c++) {
            const double unit = wide(x[t * d + c]) * scale;
            out[t * d + c] = unit * (1 + wide(weight[c]));
            sums[c] += unit * wide(grad[t * d + c]);
            product += unit * (1 + wide(weight[c])) * wide(grad[t * d + c]) / d;
        }
        for (int64_t c = 0; c < d; c++)
            back[t * d + c] = (wide(grad[t * d + c]) * (1 + wide(weight[c])) - wide(x[t * d + c]) * scale * product) * scale;
    }
    check("norm", y, out), check("norm's gradient", grad_x, back), check("norm's weight", grad_weight, sums, 8);
}

template <class X> static void gates(int64_t T, int64_t f) {
    const auto x = drawn<X>(2 * T * f), grad = drawn<X>(T * f);
    std::vector<X> y(T * f + W), grad_x(2 * T * f + W);
    gate_rows(T, f, x.data(), 2 * f, y.data(), 1);
    gate_rows_backward(T, f, x.data(), 2 * f, grad.data(), f, grad_x.data(), 2);
    std::vector<double> out(T * f), back(2 * T * f);
    for (int64_t t = 0; t < T; t++)
        for (int64_t c = 0; c < f; c++) {
            const double gate = wide(x[2 * t * f + c]), up = wide(x[(2 * t + 1) * f + c]), g = wide(grad[t * f + c]);
            const double share = 1 / (1 + std::exp(-gate));
            out[t * f + c] = gate * share * up;
            back[2 * t * f + c] = g * up * (share + gate * share * (1 - share));
            back[(2 * t + 1) * f + c] = g * gate * share;
        }
    check("gate", y, out), check("gate's gradient", grad_x, back);
}

template <class X> static void turns(int64_t T, int64_t D) {  // one head of queries and one of keys, without norms
    const auto x = drawn<X>(3 * T * D), cos = drawn<X>(T * D), sin = drawn<X>(T * D);
    std::vector<X> q(T * D + W), k(T * D + W);
    turn_heads(Heads<X>{x.data(), cos.data(), sin.data(), nullptr, T, 3 * D, 1, 1, D}, q.data(), k.data(), nullptr, 2);
    std::vector<double> turned[2] = {std::vector<double>(T * D), std::vector<double>(T * D)};
    for (int64_t t = 0; t < T; t++)
        for (int64_t h = 0; h < 2; h++)
            for (int64_t c = 0; c < D; c++) {
                const X* row = x.data() + (3 * t + h) * D;
                turned[h][t * D + c] = double(wide(row[c])) * wide(cos[t * D + c]) + double(wide(row[(c + D / 2) % D])) * wide(sin[t * D + c]);
            }
    check("turned queries", q, turned[0]), check("turned keys", k, turned[1]);
}

template <class X, class T> static void products(int64_t rows, int64_t N, int64_t K) {
    constexpr bool Pairs = sizeof(X) == 2;
    const auto weight = drawn<T>(N * K), unused = drawn<T>(1);
    const auto x = drawn<X>(rows * K);
    const auto bias = drawn<float>((N + PANEL - 1) / PANEL * PANEL);
    std::vector<T> panels((N + PANEL - 1) / PANEL * PANEL * K + 2 * W);
    std::vector<float> y(rows * N + W);
    if constexpr (Pairs) pack_pairs(N, K, weight.data(), panels.data(), 1);
    else pack_panels(N, K, weight.data(), panels.data(), 1, [](int64_t, Vec v) { return v; });
    multiply_panels(rows, N, K, panels.data(), {bias.data(), nullptr}, x.data(), y.data(), 2);
    std::vector<double> out(rows * N);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < N; n++) {
            out[r * N + n] = bias[n];
            for (int64_t k = 0; k < K; k++) out[r * N + n] += double(wide(x[r * K + k])) * wide(weight[n * K + k]);
        }
    check(Pairs ? "product of pairs" : "product", y, out, 4);
}

// Rows of float32 times a weight rounded to float16 or to int8 with scales; `exact` says what its numbers are.
template <class T, class Exact> static void rounded(const char* name, int64_t rows, int64_t N, int64_t K, Exact exact) {
    const int64_t all = (N + PANEL - 1) / PANEL * PANEL;
    const auto x = drawn<float>(rows * K), bias = drawn<float>(all), scale = drawn<float>(all);
    std::vector<T> weight(N * K), panels(all * K + 2 * W);
    std::uniform_int_distribution<int> bits(0, 0x7bff);
    for (T& w : weight) { const uint16_t b = bits(generator) % 0x4800 | (bits(generator) & 1) << 15; std::memcpy(&w, &b, sizeof w); }
    std::vector<float> y(rows * N + W);
    pack_panels(N, K, weight.data(), panels.data(), 1, [](int64_t, Vec v) { return v; });
    const bool scaled = sizeof(T) == 1;
    multiply_panels(rows, N, K, panels.data(), {bias.data(), scaled ? scale.data() : nullptr}, x.data(), y.data(), 2);
    std::vector<double> out(rows * N);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < N; n++) {
            for (int64_t k = 0; k < K; k++) out[r * N + n] += x[r * K + k] * exact(weight[n * K + k]);
            out[r * N + n] = out[r * N + n] * (scaled ? scale[n] : 1) + bias[n];
        }
    check(name, y, out, 4);
}

// Products of many rows, and their gradients, on two threads; the sums of weights' gradients are added to ones.
static void many(int64_t T, int64_t N, int64_t K) {
    const auto x = drawn<float>(T * K), weight = drawn<float>(N * K), grad = drawn<float>(T * N);
    std::vector<float> y(T * N + W), grad_x(T * K + W), grad_weight(N * K + W, 1.f);
    multiply_many(T, N, K, x.data(), K, weight.data(), K, false, y.data(), 2);
    multiply_many(T, K, N, grad.data(), N, weight.data(), K, true, grad_x.data(), 2);
    gradient_of_weight(T, N, K, grad.data(), N, x.data(), K, grad_weight.data(), true, 2);
    std::vector<double> out(T * N), back(T * K), sums(N * K, 1);
    for (int64_t t = 0; t < T; t++)
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++) {
                out[t * N + n] += double(x[t * K + k]) * weight[n * K + k];
                back[t * K + k] += double(grad[t * N + n]) * weight[n * K + k];
                sums[n * K + k] += double(grad[t * N + n]) * x[t * K + k];
            }
    check("products of many rows", y, out, 4), check("their inputs' gradient", grad_x, back, 4), check("their weight's gradient", grad_weight, sums, 4);
}

static double exact_half(float16 h) {
    const int exponent = h.bits >> 10 & 31, fraction = h.bits & 1023;
    const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
    return exponent < 31 ? (h.bits >> 15 ? -size : size) : fraction ? NAN : h.bits >> 15 ? -INFINITY : INFINITY;
}

static void kept_as(float x, uint16_t bits) {
    float16 h[W];
    store(h, (Vec{} + 1) * x);
    const bool same = std::isnan(x) ? (h[W - 1].bits & 0x7fff) > 0x7c00 : h[W - 1].bits == bits;
    if (!same) std::printf("%g is rounded to float16 %x\n", x, h[W - 1].bits), failed = 1;
}

static void every_half() {
    for (int b = 0; b < 1 << 16; b++) {
        float16 h[W];
        for (float16& one : h) one.bits = b;
        const double found = load(h)[W - 1], exact = exact_half(h[0]);
        if (std::isnan(exact) ? !std::isnan(found) : found != exact) std::printf("float16 %x is %g\n", b, found), failed = 1;
        kept_as(exact, b);
        if (std::isnan(exact) || std::isinf(exact)) continue;
        const float next = (b & 0x7fff) == 0x7bff ? std::copysign(65536., exact) : exact_half({uint16_t(b + 1)}), tie = (exact + next) / 2;
        kept_as(tie, b + (b & 1)), kept_as(std::nextafter(tie, float(exact)), b), kept_as(std::nextafter(tie, next), b + 1);
    }
}

static void numbers() {
    const float at[] = {-200, -88, -87, -1e-3f, 0, 1, 3.5f, 88, 89, INFINITY, NAN};
    for (float x : at) {
        const float found = exponential(Vec{} + x)[0], exact = x < LEAST ? 0 : std::exp(x);
        const bool same = std::isnan(exact) ? std::isnan(found) : std::isinf(exact) ? found == exact : std::abs(found - exact) <= 3e-7f * exact;
        if (!same) std::printf("exp(%g) is %g\n", x, found), failed = 1;
    }
    const float halves[] = {1.00390625f, 1.01171875f, -1e9f, INFINITY, NAN};  // ties go to the even number
    const uint16_t bits[] = {0x3f80, 0x3f82, 0xce6e, 0x7f80, 0x7fc0};
    for (int i = 0; i < 5; i++)
        if (narrow(Vec{} + halves[i])[0] != bits[i]) std::printf("%g is rounded to %x\n", halves[i], narrow(Vec{} + halves[i])[0]), failed = 1;
}

int main() {
    for (int64_t T : {1, 5, 300})
        for (int64_t d : {2, 24, 64, 250}) {
            norms<float>(T, d), norms<bfloat16>(T, d);
            gates<float>(T, d), gates<bfloat16>(T, d);
            turns<float>(T, d), turns<bfloat16>(T, d);
        }
    for (int64_t rows : {1, 7, 30})
        for (int64_t N : {1, 40, 100}) {
            products<float, float>(rows, N, 46);
            products<float, bfloat16>(rows, N, 46);
            products<bfloat16, bfloat16>(rows, N, 46);
        }
    for (int64_t rows : {1, 4, 7, 12, 16, 17, 60})  // the last converts a panel once
        for (int64_t N : {1, 40, 100}) {
            rounded<float16>("product of float16", rows, N, 45, exact_half);
            rounded<int8_t>("product of int8", rows, N, 45, [](int8_t w) { return double(w); });
        }
    for (int64_t T : {1, 100, 301})
        for (auto [N, K] : {std::pair(1, 7), std::pair(300, 41), std::pair(50, 390)}) many(T, N, K);
    every_half();
    numbers();
    std::printf("%d numbers in a vector\n", W);
    return failed;
}
