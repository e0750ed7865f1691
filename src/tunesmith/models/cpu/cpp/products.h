// Products of float32 for many rows, by blocks that stay in the caches. Each sum is of parts of inputs in one order, whatever the
// number of threads, and of rows beside it.
//
// Shapes: T rows, N outputs and K inputs of a linear module; the weight is [N, K].
#pragma once
#include "panels.h"

constexpr int64_t DEEP = 384, LONG = 192;  // inputs, and rows of a gradient, whose products are added up in registers
constexpr int64_t WIDE = 512, HIGH = 96;   // outputs and rows of a block
constexpr int64_t BLOCK_NUMBERS = DEEP * WIDE + LONG * HIGH;

// out [R, n] = or += the products of R rows and a panel [K, PANEL], K > 0. Strips: the rows lie input by input [K, R].
template <int R, bool Strips>
static void multiply_tile(int64_t K, const float* x, int64_t x_step, const float* panel, float* out, int64_t out_step, int64_t n, bool add) {
    for (int r = 0; r < R; r++) __builtin_prefetch(out + r * out_step, 1);  // there when the sums are
    // Sums begin with the first products: zeros would be written to memory first.
    Vec a[R][2], low = load(panel), high = load(panel + W);
    for (int r = 0; r < R; r++) {
        const float number = x[Strips ? r : r * x_step];
        a[r][0] = number * low;
        a[r][1] = number * high;
    }
    for (int64_t k = 1; k < K; k++) {
        low = load(panel + k * PANEL), high = load(panel + k * PANEL + W);
        in_registers(low, high);
        for (int r = 0; r < R; r++) {
            const float number = x[Strips ? k * R + r : r * x_step + k];
            a[r][0] += number * low;
            a[r][1] += number * high;
        }
    }
    if (n < PANEL) {
        for (int r = 0; r < R; r++, out += out_step)
            for (int64_t h = 0; h < 2 && n > h * W; h++)
                store(out + h * W, add ? load(out + h * W, n - h * W) + a[r][h] : a[r][h], n - h * W);
        return;
    }
    for (int r = 0; add && r < R; r++)
        for (int h = 0; h < 2; h++) a[r][h] += load(out + r * out_step + h * W);
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) store(out + r * out_step + h * W, a[r][h]);
}

using TileProduct = void (*)(int64_t, const float*, int64_t, const float*, float*, int64_t, int64_t, bool);

template <bool Strips, int... R> static TileProduct tile_product(int64_t rows, std::integer_sequence<int, R...>) {
    static const TileProduct by_rows[] = {multiply_tile<R + 1, Strips>...};
    return by_rows[rows - 1];
}

// f(first row, rows) of strips of at most TALL, of about the same height
template <class F> static void by_strips(int64_t rows, F f) {
    const int64_t strips = (rows + TALL - 1) / TALL;
    for (int64_t s = 0; s < strips; s++) f(s * rows / strips, (s + 1) * rows / strips - s * rows / strips);
}

// out [rows, n] = or += the products of rows and panels, which stay in the second cache.
template <bool Strips>
static void multiply_strips(int64_t rows, int64_t n, int64_t K, const float* x, int64_t x_step, const float* panels, float* out, int64_t out_step, bool add) {
    for (int64_t p = 0; p < n; p += PANEL)
        by_strips(rows, [&](int64_t from, int64_t count) {
            const auto product = tile_product<Strips>(count, std::make_integer_sequence<int, TALL>());
            product(K, x + from * (Strips ? K : x_step), x_step, panels + p * K, out + from * out_step + p, out_step, n - p, add);
        });
}

// Panels of n columns of x [K, n]
static void panels_of_columns(const float* x, int64_t step, int64_t K, int64_t n, float* panels) {
    for (int64_t p = 0; p < n; p += PANEL)
        for (int64_t k = 0; k < K; k++, panels += PANEL)
            for (int64_t h = 0; h < PANEL; h += W) store(panels + h, n - p > h ? load(x + k * step + p + h, n - p - h) : Vec{});
}

// Panels of n rows of x [n, K]
static void panels_of_rows(const float* x, int64_t step, int64_t K, int64_t n, float* panels) {
    for (int64_t p = 0; p < n; p += PANEL, panels += K * PANEL)
        for (int64_t h = 0; h < PANEL; h += W)
            for (int64_t k = 0; k < K; k += W) {
                Vec v[W];
                for (int64_t i = 0; i < W; i++) v[i] = p + h + i < n ? load(x + (p + h + i) * step + k, K - k) : Vec{};
                transpose(v);
                for (int64_t i = 0; i < W && k + i < K; i++) store(panels + (k + i) * PANEL + h, v[i]);
            }
}

struct Share { int64_t from, to; };  // of numbers that threads divide by whole steps

static inline Share share_of(int64_t size, int64_t step, int64_t part, int64_t parts) {
    const int64_t steps = (size + step - 1) / step;
    return {steps * part / parts * step, std::min(size, steps * (part + 1) / parts * step)};
}

static float* block_memory() {
    static thread_local std::vector<float> memory(BLOCK_NUMBERS + W);
    return (float*)(((uintptr_t)memory.data() + sizeof(Vec) - 1) / sizeof(Vec) * sizeof(Vec));
}

// out [T, N] = x [T, K] times the weight. Turned: times [K, N] instead, to the gradient of inputs; N and K are those of the product.
static void multiply_many(int64_t T, int64_t N, int64_t K, const float* x, int64_t x_step, const float* weight, int64_t step, bool turned, float* out, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t < threads; t++) {
        float* panels = block_memory();
        const Share own = share_of(N, PANEL, t, threads);
        for (int64_t n = own.from; n < own.to; n += WIDE)
            for (int64_t k = 0; k < K; k += DEEP) {
                const int64_t wide = std::min(WIDE, own.to - n), deep = std::min(DEEP, K - k);
                if (turned) panels_of_columns(weight + k * step + n, step, deep, wide, panels);
                else panels_of_rows(weight + n * step + k, step, deep, wide, panels);
                for (int64_t m = 0; m < T; m += HIGH)
                    multiply_strips<false>(std::min(HIGH, T - m), wide, deep, x + m * x_step + k, x_step, panels, out + m * N + n, N, k);
            }
    }
}

// sum [N, K] = or += grad [T, N] transposed times x [T, K]
static void gradient_of_weight(int64_t T, int64_t N, int64_t K, const float* grad, int64_t grad_step, const float* x, int64_t x_step, float* sum, bool adds, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t t = 0; t < threads; t++) {
        float *panels = block_memory(), *strips = panels + DEEP * WIDE;
        // What is not divided, each thread brings into panels or strips.
        const Share rows = N < K ? Share{0, N} : share_of(N, TALL, t, threads), columns = N < K ? share_of(K, PANEL, t, threads) : Share{0, K};
        for (int64_t k = columns.from; k < columns.to; k += WIDE)
            for (int64_t r = 0; r < T; r += LONG) {
                const int64_t wide = std::min(WIDE, columns.to - k), deep = std::min(LONG, T - r);
                panels_of_columns(x + r * x_step + k, x_step, deep, wide, panels);
                for (int64_t n = rows.from; n < rows.to; n += HIGH) {
                    const int64_t high = std::min(HIGH, rows.to - n);
                    for (int64_t i = 0; i < deep; i++) {
                        const float* row = grad + (r + i) * grad_step + n;
                        by_strips(high, [&](int64_t from, int64_t count) {
                            float* strip = strips + from * deep + i * count;
                            if (count == TALL) std::memcpy(strip, row + from, TALL * sizeof(float));
                            else std::copy_n(row + from, count, strip);
                        });
                    }
                    multiply_strips<true>(high, wide, deep, strips, 0, panels, sum + n * K + k, K, adds || r);
                }
            }
    }
}
