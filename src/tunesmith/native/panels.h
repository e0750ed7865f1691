// Products of float32 rows and weights in panels: PANEL outputs side by side, input by input, as a core reads them.
//
// Shapes: N outputs, K inputs.
#pragma once
#include <utility>
#include "vectors.h"

constexpr int64_t PANEL = 2 * W;
constexpr int TALL = W == 16 ? 12 : 6;  // rows whose sums of a panel fit into the registers

// out [R, n] of R rows x [R, K] and a panel [K, PANEL], of which n outputs are there.
template <int R, class T>
static void multiply_panel(const float* x, int64_t K, const T* panel, const float* bias, float* out, int64_t out_step, int64_t n) {
    Vec a[R][2];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) a[r][h] = bias ? load(bias + h * W) : Vec{};
    for (int64_t k = 0; k < K; k++) {
        const Vec low = load(panel + k * PANEL), high = load(panel + k * PANEL + W);
        for (int r = 0; r < R; r++) {
            a[r][0] += x[r * K + k] * low;
            a[r][1] += x[r * K + k] * high;
        }
    }
    for (int r = 0; r < R; r++) {
        store(out + r * out_step, a[r][0], n);
        if (n > W) store(out + r * out_step + W, a[r][1], n - W);
    }
}

template <class T> using PanelProduct = void (*)(const float*, int64_t, const T*, const float*, float*, int64_t, int64_t);

template <class T, int... R> static PanelProduct<T> panel_product(int64_t rows, std::integer_sequence<int, R...>) {
    static const PanelProduct<T> by_rows[] = {multiply_panel<R + 1, T>...};
    return by_rows[rows - 1];
}

// x [rows, K] times the weight, to [rows, N]; bias is null or filled up with zeros to whole panels.
template <class T>
static void multiply_panels(int64_t rows, int64_t N, int64_t K, const T* weight, const float* bias, const float* x, float* out, int64_t threads) {
    const int64_t panels = (N + PANEL - 1) / PANEL, blocks = (rows + TALL - 1) / TALL;
#pragma omp parallel for num_threads(threads) if (rows * N * K > ALONE)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = b * rows / blocks, count = (b + 1) * rows / blocks - row, from = p * PANEL;
            panel_product<T>(count, std::make_integer_sequence<int, TALL>())(
                x + row * K, K, weight + from * K, bias ? bias + from : nullptr, out + row * N + from, N, std::min(PANEL, N - from));
        }
}

template <class T> static void pack_panels(int64_t N, int64_t K, const T* weight, T* panels, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t from = 0; from < N; from += PANEL)
        for (int64_t k = 0; k < K; k++)
            for (int64_t i = 0; i < PANEL; i++) panels[from * K + k * PANEL + i] = from + i < N ? weight[(from + i) * K + k] : T{};
}
