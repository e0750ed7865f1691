// Products with weights in panels: PANEL outputs side by side, input by input, or by pairs of inputs, as a core reads them.
//
// Shapes: N outputs, K inputs.
#pragma once
#include <utility>
#include "vectors.h"

constexpr int64_t PANEL = 2 * W;
constexpr int TALL = W == 16 ? 12 : 6;  // rows whose sums of a panel fit into the registers
constexpr int64_t AHEAD = W == 16 ? 8192 : 2048;  // bytes of a panel that are asked for before they are used
template <class X> constexpr bool READS_BESIDE = W == 8 && std::is_same_v<X, float>;
template <int R> constexpr int BESIDE = R == 1 ? 4 : 3;  // panels that R rows read, whose sums fit into the registers
template <class T> constexpr bool ASKS = W == 8 || sizeof(T) < sizeof(float);  // faster where a step computes more than it reads

template <class T> constexpr int64_t FEW = W == 8 && sizeof(T) > 1 ? 8 : 4;  // blocks of rows that ask for the next panel
// A step with one block of rows computes about as long as it reads these: that block, too, asks for the next panel.
template <class X, class T> constexpr bool BALANCED = W == 8 && std::is_same_v<X, float> && sizeof(T) == sizeof(float16);

// Rows above which a panel is widened once: converting it again for each block of rows is more work then.
template <class T> constexpr int64_t WIDENS = std::is_same_v<T, bfloat16> ? 2 * TALL : 48;

struct Ends { const float *bias, *scale; };  // of the outputs, or null: x -> x scale + bias

static inline Ends ends_from(Ends ends, int64_t output) {
    return {ends.bias ? ends.bias + output : nullptr, ends.scale ? ends.scale + output : nullptr};
}

enum Asks { NOTHING, SOON, LATER };  // for what this panel needs next, or for the next panel
struct Ahead { const char* from; int64_t step; };  // what is asked for first, and bytes to what the next input asks for

// a [R, PANEL] += R rows x [R, K] times a panel [K, PANEL]
template <int R, Asks A, class T> static inline void add_panel(Vec (&a)[R][2], const float* x, int64_t K, const T* panel, Ahead ahead) {
    for (int64_t k = 0; k < K; k++) {
        if constexpr (A != NOTHING)
            for (int64_t line = 0; line < PANEL * (int64_t)sizeof(T); line += 64)
                __builtin_prefetch(ahead.from + k * ahead.step + line, 0, A == SOON ? 3 : 2);
        Vec low = load(panel + k * PANEL), high = load(panel + k * PANEL + W);
        in_registers(low, high);
        for (int r = 0; r < R; r++) {
            a[r][0] += x[r * K + k] * low;
            a[r][1] += x[r * K + k] * high;
        }
    }
}

// The same of rows of bfloat16 and a panel [K / 2, PANEL, 2]
template <int R, Asks A> static inline void add_panel(Vec (&a)[R][2], const bfloat16* x, int64_t K, const bfloat16* panel, Ahead ahead) {
    for (int64_t k = 0; k < K; k += 2) {
        if constexpr (A != NOTHING)
            for (int64_t line = 0; line < 2 * PANEL * (int64_t)sizeof(bfloat16); line += 64)
                __builtin_prefetch(ahead.from + k * ahead.step + line, 0, A == SOON ? 3 : 2);
        Bits low = load_pairs(panel + k * PANEL), high = load_pairs(panel + k * PANEL + 2 * W);
        in_registers(low, high);
        for (int r = 0; r < R; r++) {
            a[r][0] = add_pair(a[r][0], x + r * K + k, low);
            a[r][1] = add_pair(a[r][1], x + r * K + k, high);
        }
    }
}

// The sums of a panel's outputs before the first input, and what is stored of them after the last
static inline void begin_panel(Vec (&a)[2], Ends ends) {
    for (int h = 0; h < 2; h++) a[h] = ends.bias && !ends.scale ? load(ends.bias + h * W) : Vec{};
}
template <class Y> static inline void end_panel(Vec (&a)[2], Ends ends, Y* out, int64_t n) {
    for (int h = 0; ends.scale && h < 2; h++) a[h] = fused(a[h], load(ends.scale + h * W), ends.bias ? load(ends.bias + h * W) : Vec{});
    store(out, a[0], n);
    if (n > W) store(out + W, a[1], n - W);
}

// out [R, n] of R rows x and a panel, of which n outputs are there
template <int R, Asks A, class X, class T, class Y>
static void multiply_panel(const X* x, int64_t K, const T* panel, Ahead ahead, Ends ends, Y* out, int64_t out_step, int64_t n) {
    Vec a[R][2];
    for (int r = 0; r < R; r++) begin_panel(a[r], ends);
    add_panel<R, A>(a, x, K, panel, ahead);
    for (int r = 0; r < R; r++) end_panel(a[r], ends, out + r * out_step, n);
}

// The same of several panels at once: memory answers several streams sooner than one, and sums wait less for the ones before.
template <int R, class T, class Y>
static void multiply_beside(const float* x, int64_t K, const T* panels, Ends ends, Y* out, int64_t out_step, int64_t n) {
    constexpr int P = BESIDE<R>;
    Vec a[R][P][2];
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) begin_panel(a[r][p], ends_from(ends, p * PANEL));
    for (int64_t k = 0; k < K; k++)
        for (int p = 0; p < P; p++) {
            const T* weights = panels + (p * K + k) * PANEL;
            for (int64_t line = 0; line < PANEL * (int64_t)sizeof(T); line += 64) __builtin_prefetch((const char*)weights + AHEAD / P + line, 0, 3);
            Vec low = load(weights), high = load(weights + W);
            in_registers(low, high);
            for (int r = 0; r < R; r++) {
                a[r][p][0] += x[r * K + k] * low;
                a[r][p][1] += x[r * K + k] * high;
            }
        }
    for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) end_panel(a[r][p], ends_from(ends, p * PANEL), out + r * out_step + p * PANEL, n - p * PANEL);
}

template <class X, class T, class Y> using PanelProduct = void (*)(const X*, int64_t, const T*, Ahead, Ends, Y*, int64_t, int64_t);

template <Asks A, class X, class T, class Y, int... R>
static PanelProduct<X, T, Y> panel_product(int64_t rows, std::integer_sequence<int, R...>) {
    static const PanelProduct<X, T, Y> by_rows[] = {multiply_panel<R + 1, A, X, T, Y>...};
    return by_rows[rows - 1];
}

// Rows x times a panel, of which n outputs are there. The first block of rows waits for the panel from memory, so where there
// are a few, each asks for its share of the next panel: then reading does not add to computing. With more, computing is most.
template <class X, class T, class Y>
static void multiply_rows(int64_t rows, int64_t K, const T* panel, Ends ends, const X* x, Y* out, int64_t out_step, int64_t n) {
    const int64_t blocks = (rows + TALL - 1) / TALL, input = PANEL * sizeof(T), share = (input + blocks - 1) / blocks;
    const bool shares = blocks <= FEW<T> && (blocks > 1 || BALANCED<X, T>);
    const std::make_integer_sequence<int, TALL> sizes;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t row = b * rows / blocks, count = (b + 1) * rows / blocks - row;
        const Ahead ahead = shares ? Ahead{(const char*)panel + K * (input + b * share), share}
                                   : Ahead{(const char*)panel + AHEAD, input};
        const auto product = shares ? panel_product<LATER, X, T, Y>(count, sizes)
                             : b || !ASKS<T> ? panel_product<NOTHING, X, T, Y>(count, sizes)
                                             : panel_product<SOON, X, T, Y>(count, sizes);
        product(x + row * K, K, panel, ahead, ends, out + row * out_step, out_step, n);
    }
}

// x [rows, K] times a panel, to n outputs of [rows, N]
template <class X, class T, class Y>
static void multiply_by_panel(int64_t rows, int64_t N, int64_t K, const T* panel, Ends ends, const X* x, Y* out, int64_t n) {
    constexpr bool widens = std::is_same_v<X, float> && !std::is_same_v<T, float>;
    if (widens && rows > WIDENS<T>) {
        static thread_local std::vector<float> wide;
        room(wide, K * PANEL);
        for (int64_t i = 0; i < K * PANEL; i += W) store(wide.data() + i, load(panel + i));
        multiply_rows(rows, K, wide.data(), ends, (const float*)x, out, N, n);
    } else
        multiply_rows(rows, K, panel, ends, x, out, N, n);
}

// x [rows, K] times the weight, to [rows, N]; bias and scale are null or filled up to whole panels.
template <class X, class T, class Y>
static void multiply_panels(int64_t rows, int64_t N, int64_t K, const T* weight, Ends ends, const X* x, Y* out, int64_t threads) {
    const int64_t panels = (N + PANEL - 1) / PANEL;
    const int64_t beside = !READS_BESIDE<X> ? 1 : rows == 1 ? BESIDE<1> : rows == 2 ? BESIDE<2> : 1;
    const int64_t together = panels >= 2 * beside * threads ? beside : 1, parts = (panels + together - 1) / together;
#pragma omp parallel for num_threads(threads) if (rows * N * K > ALONE)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = part * together, last = std::min(panels, first + together), from = first * PANEL;
        if constexpr (READS_BESIDE<X>)
            if (together > 1 && last - first == together) {
                const auto product = rows == 1 ? multiply_beside<1, T, Y> : multiply_beside<2, T, Y>;
                product(x, K, weight + from * K, ends_from(ends, from), out + from, N, N - from);
                continue;
            }
        for (int64_t at = from; at < last * PANEL; at += PANEL)
            multiply_by_panel(rows, N, K, weight + at * K, ends_from(ends, at), x, out + at, std::min(PANEL, N - at));
    }
}

// as(output, numbers): how the panels keep some of an output's numbers.
template <class X, class T, class As>
static void pack_panels(int64_t N, int64_t K, const X* weight, T* panels, int64_t threads, As as) {
#pragma omp parallel for num_threads(threads)
    for (int64_t from = 0; from < N; from += PANEL)
        for (int64_t k = 0; k < K; k += W)
            for (int64_t h = 0; h < PANEL; h += W) {
                Vec v[W];
                for (int64_t i = 0, n = from + h; i < W; i++, n++) v[i] = n < N ? as(n, load(weight + n * K + k, K - k)) : Vec{};
                transpose(v);
                for (int64_t i = 0; i < W && k + i < K; i++) store(panels + from * K + (k + i) * PANEL + h, v[i]);
            }
}

// Two inputs lie side by side.
static void pack_pairs(int64_t N, int64_t K, const bfloat16* weight, bfloat16* panels, int64_t threads) {
#pragma omp parallel for num_threads(threads)
    for (int64_t from = 0; from < N; from += PANEL)
        for (int64_t k = 0; k < K; k += 2)
            for (int64_t i = 0; i < PANEL; i++)
                for (int64_t j = 0; j < 2; j++)
                    panels[from * K + k * PANEL + i * 2 + j] = from + i < N ? weight[(from + i) * K + k + j] : bfloat16{};
}
