// Attention of float32 rows in a forest, and its gradients. A row sees those of its segment up to itself, and all of the
// segments above; the rows that see it follow each other, up to the end of its segment's descendants.
//
// Shapes: T rows; H query heads, K key/value heads, G = H / K, D head size, a multiple of 2 W.
#pragma once
#include "panels.h"

struct Segments {
    int64_t count;
    const int64_t *starts, *lengths, *lasts;  // lasts: of a segment and its descendants, the end

    std::vector<int64_t> roots() const {  // the first segments of its trees, and the end
        std::vector<int64_t> found;
        for (int64_t s = 0, last = -1; s < count; s++)
            if (starts[s] >= last) found.push_back(s), last = lasts[s];
        found.push_back(count);
        return found;
    }
};

constexpr int64_t KEYS = 8 * TALL;  // keys at a time: whole panels, and whole blocks of rows
constexpr int64_t SEEING = 48;      // rows at a time that see them

struct Side { const float* at; int64_t step, panel; };  // of a product, the right one [n, columns]; panel: from one to the next

// out [R, PANEL] = or += the products of x [R, n], whose rows are `step` apart or, Across, side by side
template <int R, bool Across, bool Adds>
static void multiply_side(const float* x, int64_t step, int64_t n, const float* panel, int64_t panel_step, float* out, int64_t out_step) {
    const int64_t row = Across ? 1 : step, next = Across ? step : 1;
    Vec a[R][2];
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) a[r][h] = Adds ? load(out + r * out_step + h * W) : Vec{};
    for (int64_t k = 0; k < n; k++) {
        Vec low = load(panel + k * panel_step), high = load(panel + k * panel_step + W);
        in_registers(low, high);
        for (int r = 0; r < R; r++) {
            a[r][0] += x[r * row + k * next] * low;
            a[r][1] += x[r * row + k * next] * high;
        }
    }
    for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) store(out + r * out_step + h * W, a[r][h]);
}

using SideProduct = void (*)(const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t);

template <bool Across, bool Adds, int... R> static SideProduct side_product(int64_t rows, std::integer_sequence<int, R...>) {
    static const SideProduct by_rows[] = {multiply_side<R + 1, Across, Adds>...};
    return by_rows[rows - 1];
}

// out [rows, columns] = or += x [rows, n] times right
template <bool Across, bool Adds>
static void multiply_sides(int64_t rows, int64_t n, int64_t columns, const float* x, int64_t step, Side right, float* out, int64_t out_step) {
    const std::make_integer_sequence<int, TALL> sizes;
    for (int64_t c = 0; c < columns; c += PANEL, right.at += right.panel)
        for (int64_t row = 0, count; row < rows; row += count) {
            count = std::min<int64_t>(TALL, rows - row);
            side_product<Across, Adds>(count, sizes)(x + row * (Across ? 1 : step), step, n, right.at, right.step, out + row * out_step + c, out_step);
        }
}

struct HeadRows {  // [T, heads, D]
    const float* at;
    int64_t step;
    const float* row(int64_t t, int64_t column) const { return at + t * step + column; }
};

struct Forest {
    Segments segments;
    HeadRows q, k, v;
    int64_t T, H, K, D;
    float scale;
    int64_t skipped;  // rows before the first query; pointers to queries and what is theirs point that far before it
};

// Rows x [n, D] as columns in panels [D, PANEL], the last one filled up with zeros; D is a multiple of W.
static void pack_columns(const float* x, int64_t step, int64_t n, int64_t D, float* panels) {
    for (int64_t from = 0; from < n; from += PANEL, panels += D * PANEL)
        for (int64_t h = 0; h < PANEL; h += W)
            for (int64_t c = 0; c < D; c += W) {
                Vec v[W];
                for (int64_t i = 0; i < W; i++) v[i] = from + h + i < n ? load(x + (from + h + i) * step + c) : Vec{};
                transpose(v);
                for (int64_t i = 0; i < W; i++) store(panels + (c + i) * PANEL + h, v[i]);
            }
}

static inline int64_t in_panels(int64_t columns) { return (columns + PANEL - 1) / PANEL * PANEL; }

// f(the first of some keys, how many, the end of those that see them) for all of the trees' segments
template <class F> static void by_keys(const Segments& s, int64_t first, int64_t end, F f) {
    for (int64_t i = first; i < end; i++)
        for (int64_t at = 0; at < s.lengths[i]; at += KEYS) f(s.starts[i] + at, std::min(KEYS, s.lengths[i] - at), s.lasts[i]);
}

// scores of a row, of which `seen` count, become weights; updates its largest score and total, and what was mixed before
static void weigh(float* scores, int64_t columns, int64_t seen, float scale, float& most, float& total, float* mixed, int64_t D) {
    for (int64_t c = seen; c < columns; c++) scores[c] = -INFINITY;
    Vec top = load(scores);
    for (int64_t c = W; c < columns; c += W) { const Vec v = load(scores + c); top = v > top ? v : top; }
    float now = top[0];
    for (int i = 1; i < W; i++) now = top[i] > now ? top[i] : now;
    now = std::max(now * scale, most);
    Vec sums = {};
    for (int64_t c = 0; c < columns; c += W) {
        const Vec v = exponential(load(scores + c) * scale - now);
        sums += v;
        store(scores + c, v);
    }
    if (now != most) {
        const float factor = exponential(Vec{} + (most - now))[0];
        for (int64_t c = 0; c < D; c += W) store(mixed + c, load(mixed + c) * factor);
        total *= factor, most = now;
    }
    total += sum(sums);
}

// One query head of a tree: out [T, H, D] and its log-sum-exp [H, T].
static void attend_tree(const Forest& f, int64_t first, int64_t end, int64_t head, float* out, float* lse) {
    const int64_t D = f.D, step = f.H * D, own = head * D, of_key = head / (f.H / f.K) * D;
    const int64_t begin = std::max(f.segments.starts[first], f.skipped), rows = f.segments.lasts[first] - begin;
    static thread_local std::vector<float> memory;
    float *columns = room(memory, KEYS * D + SEEING * KEYS + 2 * rows), *scores = columns + KEYS * D, *most = scores + SEEING * KEYS, *total = most + rows;
    std::fill(most, total, -INFINITY), std::fill(total, total + rows, 0.f);
    for (int64_t t = begin; t < begin + rows; t++) std::fill_n(out + t * step + own, D, 0.f);
    by_keys(f.segments, first, end, [&](int64_t key, int64_t count, int64_t last) {
        pack_columns(f.k.row(key, of_key), f.k.step, count, D, columns);
        for (int64_t from = std::max(key, f.skipped), n; from < last; from += n) {
            n = std::min(SEEING, last - from);
            const int64_t seen = std::min(count, from + n - key), width = in_panels(seen);
            multiply_sides<false, false>(n, D, width, f.q.row(from, own), f.q.step, {columns, PANEL, PANEL * D}, scores, KEYS);
            for (int64_t i = 0, t = from; i < n; i++, t++)
                weigh(scores + i * KEYS, width, std::min(seen, t + 1 - key), f.scale, most[t - begin], total[t - begin], out + t * step + own, D);
            multiply_sides<false, true>(n, seen, D, scores, KEYS, {f.v.row(key, of_key), f.v.step, PANEL}, out + from * step + own, step);
        }
    });
    for (int64_t t = 0; t < rows; t++) {
        float* mixed = out + (begin + t) * step + own;
        for (int64_t c = 0; c < D; c += W) store(mixed + c, load(mixed + c) / total[t]);
        lse[head * f.T + begin + t] = most[t] + std::log(total[t]);
    }
}

struct Slopes { HeadRows out, grad; const float* lse; float *q, *k, *v; };  // gradients [T, H, D], of keys and values by query head

// scores [n, KEYS] of rows from `from` become weights, and their gradients become those of scores times the scale
static void slope(const Forest& f, const Slopes& g, int64_t head, int64_t from, int64_t n, int64_t key, int64_t count, const float* delta, float* scores, float* slopes) {
    for (int64_t i = 0, t = from; i < n; i++, t++) {
        const float lse = g.lse[head * f.T + t];
        const int64_t seen = std::min(count, t + 1 - key), at = i * KEYS;
        for (int64_t c = 0; c < seen; c += W) {
            const Vec share = exponential(load(scores + at + c) * f.scale - lse);
            store(scores + at + c, share);
            store(slopes + at + c, share * (load(slopes + at + c) - delta[t]) * f.scale);
        }
        for (int64_t c = seen; c < count; c++) scores[at + c] = slopes[at + c] = 0;
    }
}

static void attend_tree_backward(const Forest& f, const Slopes& g, int64_t first, int64_t end, int64_t head) {
    const int64_t D = f.D, step = f.H * D, own = head * D, of_key = head / (f.H / f.K) * D;
    const int64_t begin = f.segments.starts[first], rows = f.segments.lasts[first] - begin;
    static thread_local std::vector<float> memory;
    float *keys = room(memory, 2 * KEYS * D + 2 * SEEING * KEYS + rows), *values = keys + KEYS * D, *scores = values + KEYS * D, *slopes = scores + SEEING * KEYS;
    float* delta = slopes + SEEING * KEYS;
    for (int64_t t = 0; t < rows; t++) {
        const float *grad = g.grad.row(begin + t, own), *out = g.out.row(begin + t, own);
        Vec product = {};
        for (int64_t c = 0; c < D; c += W) product += load(grad + c) * load(out + c);
        delta[t] = sum(product);
        std::fill_n(g.q + (begin + t) * step + own, D, 0.f);
    }
    by_keys(f.segments, first, end, [&](int64_t key, int64_t count, int64_t last) {
        pack_columns(f.k.row(key, of_key), f.k.step, count, D, keys);
        pack_columns(f.v.row(key, of_key), f.v.step, count, D, values);
        for (int64_t t = key; t < key + count; t++)
            std::fill_n(g.k + t * step + own, D, 0.f), std::fill_n(g.v + t * step + own, D, 0.f);
        for (int64_t from = key, n; from < last; from += n) {
            n = std::min(SEEING, last - from);
            const int64_t seen = std::min(count, from + n - key), width = in_panels(seen);
            const float *q = f.q.row(from, own), *grad = g.grad.row(from, own);
            multiply_sides<false, false>(n, D, width, q, f.q.step, {keys, PANEL, PANEL * D}, scores, KEYS);
            multiply_sides<false, false>(n, D, width, grad, g.grad.step, {values, PANEL, PANEL * D}, slopes, KEYS);
            slope(f, g, head, from, n, key, seen, delta - begin, scores, slopes);
            multiply_sides<true, true>(seen, n, D, scores, KEYS, {grad, g.grad.step, PANEL}, g.v + key * step + own, step);
            multiply_sides<true, true>(seen, n, D, slopes, KEYS, {q, f.q.step, PANEL}, g.k + key * step + own, step);
            multiply_sides<false, true>(n, seen, D, slopes, KEYS, {f.k.row(key, of_key), f.k.step, PANEL}, g.q + from * step + own, step);
        }
    });
}

// f(first, end, head) of every query head of every tree
template <class F> static void by_trees(const Forest& f, int64_t threads, F run) {
    const std::vector<int64_t> roots = f.segments.roots();
    const int64_t work = (int64_t(roots.size()) - 1) * f.H;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (work > 1 && f.T * f.H * f.D > ALONE)
    for (int64_t i = 0; i < work; i++) run(roots[i / f.H], roots[i / f.H + 1], i % f.H);
}
