// What a decode step computes between its large products, for rows of bfloat16 or float32; sums are float32.
//
// Shapes: B rows, H query heads, K key/value heads, G = H / K, D head size, d hidden size, f feed-forward size,
// V vocabulary. Keys and values are [plane, block, K, slot, D]; plane 2 l are the keys of layer l, 2 l + 1 its values.
#include "keys.h"
#include "operations.h"
#include "panels.h"

struct Bank { void* data; int64_t plane, block, head, slots; };  // steps in numbers, and the slots of a block

struct Kept {  // tensors whose numbers are read
    std::vector<Tensor> tensors;
    template <class T> T* keep(const Maybe& t) {
        if (!t) return nullptr;
        tensors.push_back(whole(*t));
        return numbers<T>(tensors.back());
    }
};

struct Step : Kept {
    int64_t rows, kv_heads, dim;
    bool narrow_bank;
    int64_t blocks;             // rows of one prompt that are computed together
    const int64_t* starts;      // [blocks + 1] of `order`
    const int64_t* order;       // [B], rows by block
    const int64_t* prompt;      // [B] tokens of the prompt
    int64_t* written;           // [B] tokens of the row before this one
    int64_t* table;             // [B] row of the rotary tables
    const int64_t *prompts, *own;  // [B, width] blocks of the prompt, and of the row after it
    int64_t prompts_width, own_width;
    Bank bank;
    std::vector<const float*> rotary;  // cosines and sines [tokens, D] by kind of layer, the first half of sines negated
};

enum Weights {
    AS_IT_IS,      // weight [N, K] of bfloat16, for rows of bfloat16; the others are panels
    PANELS,        // of any type, for rows of float32
    PAIRS,         // of bfloat16, pairs of inputs side by side, for rows of bfloat16
    HALVES,        // panels of float16, which a weight is rounded to
    BYTES,         // panels of int8, the same, in steps of each output's scale
};

struct Product : Kept {
    const void *weight, *bias;
    const float* scale;               // of outputs, where the weight is int8
    int64_t outputs, inputs, layout;  // a Weights; panels of any numbers are PANELS
    ScalarType type;                  // of the weight
    const Product *down = nullptr, *up = nullptr;  // of an adapter beside the weight, in panels of float32
};

// f(a number of the weight's type)
template <class F> static void by_weight(ScalarType type, F f) {
    if (type == ScalarType::BFloat16) f(bfloat16());
    else if (type == ScalarType::Half) f(float16());
    else if (type == ScalarType::Char) f(int8_t());
    else f(float());
}

struct Layer : Kept {
    int64_t plane, heads, window;  // window 0: none
    float scale, softcap, eps;     // softcap 0: none; eps of all norms
    const float *q_norm, *k_norm;  // [D], or null
    const float *before_attention, *after_attention, *before_mlp, *after_mlp;  // [d], the second and last may be null
    int64_t rotary, activation;    // rotary: the layer's kind, or -1
    const Product *qkv, *out, *gate_up, *down;  // where all are computed here
};

// A head of queries or keys of a row: normed, rotated, times `factor`; out is padded with zeros.
template <class X>
static void make_head(const Step& s, const Layer& l, const X* x, const float* norm, int64_t row, float factor, float* out) {
    const int64_t D = s.dim, half = D / 2;
    if (norm) {
        Vec squares = {};
        for (int64_t c = 0; c < D; c += W) { Vec v = load(x + c, D - c); squares += v * v; }
        factor /= std::sqrt(sum(squares) / D + l.eps);
    }
    for (int64_t c = 0; c < D; c += W) {
        Vec v = load(x + c, D - c) * factor;
        store(out + c, norm ? v * load(norm + c, D - c) : v);
    }
    if (l.rotary < 0) return;
    const float *cos = s.rotary[2 * l.rotary] + s.table[row] * D, *sin = s.rotary[2 * l.rotary + 1] + s.table[row] * D;
    for (int64_t i = 0; i < half; i++) {
        float low = out[i], high = out[i + half];
        out[i] = low * cos[i] + high * sin[i];
        out[i + half] = high * cos[i + half] + low * sin[i + half];
    }
}

// x becomes exp(x - its largest), whose sum is returned; there is room for W numbers more.
static float exponentials(float* x, int64_t n) {
    for (int i = 0; i < W; i++) x[n + i] = -INFINITY;
    Vec most = load(x), total = {};
    for (int64_t i = W; i < n; i += W) { Vec v = load(x + i); most = v > most ? v : most; }
    float top = most[0];
    for (int i = 1; i < W; i++) top = most[i] > top ? most[i] : top;
    for (int64_t i = 0; i < n; i += W) { Vec v = exponential(load(x + i) - top); total += v; store(x + i, v); }
    return sum(total);
}

// One key/value head of the rows of a block: writes their keys and values, and attends. N: of queries and weights.
template <class X, class T, class N>
static void attend_block(const Step& s, const Layer& l, const X* qkv, X* out, int64_t block, int64_t head) {
    const int64_t D = s.dim, G = l.heads / s.kv_heads, padded = (D + 2 * W - 1) / (2 * W) * (2 * W);
    const int64_t *rows = s.order + s.starts[block], count = s.starts[block + 1] - s.starts[block], queries = count * G;
    const int64_t prompt = s.prompt[rows[0]];
    auto begin_of = [&](int64_t row) { return l.window ? std::max<int64_t>(prompt + s.written[row] + 1 - l.window, 0) : 0; };
    int64_t longest = 0, first = prompt;
    for (int64_t m = 0; m < count; m++) {
        longest = std::max(longest, s.written[rows[m]] + 1);
        first = std::min(first, begin_of(rows[m]));
    }
    const int64_t width = prompt + longest + W;
    static thread_local std::vector<float> memory;
    static thread_local std::vector<N> numbers;
    float *mixed = room(memory, (queries + 1) * padded + queries * (width + 1)), *made = mixed + queries * padded, *totals = made + padded, *scores = totals + queries;
    constexpr bool narrows = !std::is_same_v<N, float>;
    N *q = room(numbers, queries * (padded + narrows * width)), *weights;
    if constexpr (narrows) weights = q + queries * padded;
    else weights = scores;
    std::fill(mixed, totals, 0.f);
    const int64_t size = s.bank.slots;
    T* bank = (T*)s.bank.data + l.plane * s.bank.plane + head * s.bank.head;
    auto at = [&](const int64_t* table, int64_t slot) { return bank + table[slot / size] * s.bank.block + slot % size * D; };
    // f(slot, its place in the keys, how many slots follow each other there)
    auto by_block = [&](const int64_t* table, int64_t from, int64_t to, auto f) {
        for (int64_t slot = from, n; slot < to; slot += n) f(slot, at(table, slot), n = std::min(to - slot, size - slot % size));
    };
    // Keys and values of a step lie in many small blocks, each of which a core would begin to read too late.
    auto ask = [&](const T* p, int64_t n) {
        for (const char *line = (const char*)p, *end = (const char*)(p + n * D); line < end; line += 64) __builtin_prefetch(line, 0, 2);
    };
    const int64_t* shared = s.prompts + rows[0] * s.prompts_width;
    for (int64_t m = 0; m < count; m++) {
        const int64_t row = rows[m], slot = s.written[row], begin = std::max<int64_t>(begin_of(row) - prompt, 0);
        const X *x = qkv + row * (l.heads + 2 * s.kv_heads) * D, *value = x + (l.heads + s.kv_heads + head) * D;
        const int64_t* table = s.own + row * s.own_width;
        T* keys = at(table, slot);
        make_head(s, l, x + (l.heads + head) * D, l.k_norm, row, 1, made);
        for (int64_t c = 0; c < D; c += W) {
            store(keys + c, load(made + c), D - c);
            store(keys + s.bank.plane + c, load(value + c, D - c), D - c);
        }
        for (int64_t g = 0; g < G; g++) {
            make_head(s, l, x + (head * G + g) * D, l.q_norm, row, l.scale, made);
            for (int64_t c = 0; c < padded; c += W) store(q + (m * G + g) * padded + c, load(made + c));
        }
        by_block(table, begin, slot + 1, [&](int64_t from, const T* k, int64_t n) {
            ask(k + s.bank.plane, n);
            if (from + n <= slot) ask(at(table, from + n), std::min(size, slot + 1 - from - n));
            else if (m + 1 < count) ask(bank + s.own[rows[m + 1] * s.own_width] * s.bank.block, std::min(size, s.written[rows[m + 1]]));
            all_dots(G, q + m * G * padded, padded, k, n, D, scores + m * G * width + prompt + from, width);
        });
    }
    by_block(shared, first, prompt, [&](int64_t from, const T* k, int64_t n) {
        ask(k + s.bank.plane, n);
        if (from + n < prompt) ask(at(shared, from + n), std::min(size, prompt - from - n));
        all_dots(queries, q, padded, k, n, D, scores + from, width);
    });
    for (int64_t i = 0; i < queries; i++) {
        const int64_t row = rows[i / G], begin = begin_of(row), n = prompt + s.written[row] + 1 - begin;
        float* own = scores + i * width + begin;
        if (l.softcap)
            for (int64_t c = 0; c < n; c += W) store(own + c, hyperbolic_tangent(load(own + c) / l.softcap) * l.softcap);
        totals[i] = exponentials(own, n);
        std::fill(scores + i * width + std::min(first, begin), own, 0.f);
        own[n] = 0;
        if constexpr (narrows)
            for (int64_t c = std::min(first, begin); c <= begin + n; c += W) store(weights + i * width + c, load(scores + i * width + c));
    }
    auto values_of = [&](const int64_t* table, int64_t from, int64_t to) {
        return [=, &by_block, &s](auto f) { by_block(table, from, to, [&](int64_t slot, const T* k, int64_t n) { f(slot, k + s.bank.plane, n); }); };
    };
    all_mix<T>(queries, weights, width, values_of(shared, first, prompt), D, mixed, padded);
    for (int64_t m = 0; m < count; m++) {
        const int64_t row = rows[m], begin = std::max<int64_t>(begin_of(row) - prompt, 0);
        const auto values = values_of(s.own + row * s.own_width, begin, s.written[row] + 1);
        all_mix<T>(G, weights + m * G * width + prompt, width, values, D, mixed + m * G * padded, padded);
        for (int64_t g = 0; g < G; g++)
            for (int64_t c = 0; c < D; c += W)
                store(out + (row * l.heads + head * G + g) * D + c, load(mixed + (m * G + g) * padded + c) / totals[m * G + g], D - c);
    }
}

template <class X, class T> static void attend(const Step& s, const Layer& l, const X* qkv, X* out) {
    int64_t tokens = 0;
    for (int64_t row = 0; row < s.rows; row++) tokens += s.prompt[row] + s.written[row] + 8;
    const int64_t work = s.blocks * s.kv_heads;
    constexpr bool in_pairs = MULTIPLIES_PAIRS && std::is_same_v<X, bfloat16> && std::is_same_v<T, bfloat16>;
    using N = std::conditional_t<in_pairs, bfloat16, float>;
    const auto of_block = s.dim % (2 * W) ? attend_block<X, T, float> : attend_block<X, T, N>;
#pragma omp parallel for num_threads(threads()) schedule(dynamic, 1) if (work > 1 && tokens * l.heads * s.dim > ALONE)
    for (int64_t i = 0; i < work; i++) of_block(s, l, qkv, out, i / s.kv_heads, i % s.kv_heads);
}

// x [B, d] += y, or its norm where there is `inner`; out = the norm of x. y may be null.
template <class X> static void add_norm(int64_t rows, int64_t d, float* x, const X* y, const float* inner, const float* weight, float eps, X* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * d > ALONE)
    for (int64_t row = 0; row < rows; row++) {
        float* own = x + row * d;
        const X* new_ = y + (y ? row * d : 0);
        Vec squares = {};
        float scale = 1;
        if (inner) {
            for (int64_t c = 0; c < d; c += W) { Vec v = load(new_ + c, d - c); squares += v * v; }
            scale = 1 / std::sqrt(sum(squares) / d + eps);
            squares = Vec{};
        }
        for (int64_t c = 0; c < d; c += W) {
            Vec v = load(own + c, d - c);
            if (y) {
                Vec more = load(new_ + c, d - c) * scale;
                v += inner ? more * load(inner + c, d - c) : more;
                store(own + c, v, d - c);
            }
            squares += v * v;
        }
        scale = 1 / std::sqrt(sum(squares) / d + eps);
        for (int64_t c = 0; c < d; c += W) store(out + row * d + c, load(own + c, d - c) * scale * load(weight + c, d - c), d - c);
    }
}

static inline Vec activated(Vec x, int64_t kind) {
    if (kind == 0) return x / (1.f + exponential(-x));  // silu
    if (kind == 1) return x / (1.f + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));  // gelu, by tanh
    for (int i = 0; i < W; i++) x[i] *= 0.5f * (1 + std::erf(x[i] * 0.70710678f));  // gelu
    return x;
}

// out [B, f] = activation(x[:, :f]) * x[:, f:]
template <class X> static void gated(int64_t rows, int64_t f, const X* x, X* out, int64_t kind, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (rows * f > ALONE / 4)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < f; c += W) {
            const X* gate = x + row * 2 * f + c;
            store(out + row * f + c, activated(load(gate, f - c), kind) * load(gate + f, f - c), f - c);
        }
}

#ifdef __AMX_BF16__
// Products of A * 16 rows of weights and B * 16 columns of x, to 16 x 16 sums each.
template <int A, int B> static void tile_sums(const bfloat16* w, const bfloat16* x, int64_t K, int64_t block, float* sums) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < K; k += 2 * W) {
        _tile_loadd(6, x + k * W, 64);
        if (B > 1) _tile_loadd(7, x + block + k * W, 64);
        _tile_loadd(4, w + k, 2 * K);
        _tile_dpbf16ps(0, 4, 6);
        if (B > 1) _tile_dpbf16ps(1, 4, 7);
        if (A > 1) {
            _tile_loadd(5, w + W * K + k, 2 * K);
            _tile_dpbf16ps(2, 5, 6);
            if (B > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    if (B > 1) _tile_stored(1, sums + W * W, 64);
    if (A > 1) _tile_stored(2, sums + 2 * W * W, 64);
    if (A > 1 && B > 1) _tile_stored(3, sums + 3 * W * W, 64);
}

// The weights are read as they are; x is packed: pairs of its numbers, by column of a tile.
template <class Y> static void multiply_tiles(int64_t rows, const Product& p, const bfloat16* x, Y* out, int64_t threads) {
    const int64_t N = p.outputs, K = p.inputs, blocks = (rows + W - 1) / W, block = K * W, parts = (N + 2 * W - 1) / (2 * W);
    const bfloat16 *weight = (const bfloat16*)p.weight, *own_bias = (const bfloat16*)p.bias;
    static thread_local std::vector<bfloat16> memory;
    bfloat16* packed = room(memory, blocks * block);
#pragma omp parallel num_threads(threads) if (rows * N * K > ALONE)
    {
        configure_tiles();
#pragma omp for
        for (int64_t i = 0; i < blocks * (K / (2 * W)); i++) {
            const int64_t row = i / (K / (2 * W)) * W, k = i % (K / (2 * W)) * 2 * W;
            Vec words[W];
            for (int j = 0; j < W; j++) std::memcpy(&words[j], x + std::min(row + j, rows - 1) * K + k, sizeof(Vec));
            transpose(words);
            std::memcpy(packed + row / W * block + k * W, words, sizeof words);
        }
#pragma omp for
        for (int64_t part = 0; part < parts; part++)
            for (int64_t b = 0; b < blocks; b += 2) {
                const int64_t from = part * 2 * W;
                const bool two = N - from > W, both = blocks - b > 1;
                alignas(64) float sums[4 * W * W];
                (two ? both ? tile_sums<2, 2> : tile_sums<2, 1> : both ? tile_sums<1, 2> : tile_sums<1, 1>)(
                    weight + from * K, packed + b * block, K, block, sums);
                for (int i = 0; i < (two ? 2 : 1); i++)
                    for (int j = 0; j < (both ? 2 : 1); j++) {
                        Vec v[W], bias = own_bias ? load(own_bias + from + i * W) : Vec{};
                        for (int n = 0; n < W; n++) v[n] = load(sums + ((2 * i + j) * W + n) * W);
                        transpose(v);
                        for (int64_t m = 0, row = (b + j) * W; m < W && row + m < rows; m++)
                            store(out + (row + m) * N + from + i * W, v[m] + bias);
                    }
            }
        release_tiles();
    }
}
#endif

// Rows of bfloat16, x [rows, K], times the weight, to [rows, N], where K is a multiple of 2 W and N of W.
template <class Y> static void multiply(int64_t rows, const Product& p, const bfloat16* x, Y* out, int64_t threads) {
    if (p.layout == PAIRS)
        return multiply_panels(rows, p.outputs, p.inputs, (const bfloat16*)p.weight, {(const float*)p.bias, nullptr}, x, out, threads);
    constexpr int64_t PART = 64;
    const int64_t N = p.outputs, K = p.inputs, parts = (N + PART - 1) / PART;
    const bfloat16 *weight = (const bfloat16*)p.weight, *bias = (const bfloat16*)p.bias;
#ifdef __AMX_BF16__
    if (rows > 2 && has_tiles()) return multiply_tiles(rows, p, x, out, threads);
#endif
#pragma omp parallel for num_threads(threads) if (rows * N * K > ALONE)
    for (int64_t part = 0; part < parts; part++) {
        const int64_t from = part * PART, n = std::min(PART, N - from);
        by_queries(rows, [&](int64_t row, auto size) {
            constexpr int Q = decltype(size)::value;
            float found[Q * PART];
            narrow_dots<Q>(x + row * K, weight + from * K, n, K, found, PART);
            for (int q = 0; q < Q; q++)
                for (int64_t c = 0; c < n; c += W) {
                    Vec v = load(found + q * PART + c);
                    store(out + (row + q) * N + from + c, bias ? v + load(bias + from + c) : v);
                }
        });
    }
}

// Rows of float32 times a weight in panels; as many rows at a time as a core's cache holds beside a panel.
static void multiply(int64_t rows, const Product& p, const float* x, float* out, int64_t threads) {
    constexpr int64_t CACHED = 1 << 17;  // numbers
    const int64_t most = std::max<int64_t>(CACHED / p.inputs, 128), parts = (rows + most - 1) / most;
    by_weight(p.type, [&](auto number) {
        for (int64_t part = 0; part < parts; part++) {
            const int64_t from = part * rows / parts, count = (part + 1) * rows / parts - from;
            multiply_panels(count, p.outputs, p.inputs, (const decltype(number)*)p.weight, {(const float*)p.bias, p.scale},
                            x + from * p.inputs, out + from * p.outputs, threads);
        }
    });
}

// out += up(down(x)), a few rows at a time
template <class X, class Y> static void add_adapter(int64_t rows, const Product& p, const X* x, Y* out, int64_t threads) {
    constexpr int64_t MOST = 64;
    const int64_t K = p.inputs, N = p.outputs, R = p.down->outputs;
    static thread_local std::vector<float> memory;
    room(memory, std::min(rows, MOST) * (K + R + N));
    for (int64_t from = 0, count; from < rows; from += count) {
        count = std::min(rows - from, MOST);
        float *wide = memory.data(), *low = wide + count * K, *change = low + count * R;
        if constexpr (std::is_same_v<X, float>) wide = const_cast<float*>(x + from * K);
        else for (int64_t i = 0; i < count * K; i++) wide[i] = as_float(x[from * K + i]);
        multiply(count, *p.down, wide, low, threads);
        multiply(count, *p.up, low, change, threads);
        Y* own = out + from * N;
        for (int64_t i = 0, all = count * N; i < all; i += W) store(own + i, load(own + i, all - i) + load(change + i, all - i), all - i);
    }
}

template <class X, class Y> static void multiply_adapted(int64_t rows, const Product& p, const X* x, Y* out, int64_t threads) {
    multiply(rows, p, x, out, threads);
    if (p.down) add_adapter(rows, p, x, out, threads);
}

// All layers: x [B, d] is the embedded tokens; out the normed states after the last layer.
template <class X> static void run_layers(const Step& s, const std::vector<const Layer*>& layers, int64_t d, float* x, const float* last, X* out) {
    const Layer& first = *layers[0];
    const int64_t B = s.rows, wide = first.qkv->outputs, seen_width = first.heads * s.dim, inside = first.down->inputs, team = threads();
    static thread_local std::vector<X> memory;
    X *normed = room(memory, B * (2 * d + wide + seen_width + 3 * inside)), *y = normed + B * d, *qkv = y + B * d, *seen = qkv + B * wide;
    X *both = seen + B * seen_width, *active = both + 2 * B * inside;
    const float* inner = nullptr;
    for (const Layer* layer : layers) {
        const Layer& l = *layer;
        add_norm(B, d, x, layer == &first ? nullptr : y, inner, l.before_attention, l.eps, normed, team);
        multiply_adapted(B, *l.qkv, normed, qkv, team);
        s.narrow_bank ? attend<X, bfloat16>(s, l, qkv, seen) : attend<X, float>(s, l, qkv, seen);
        multiply_adapted(B, *l.out, seen, y, team);
        add_norm(B, d, x, y, l.after_attention, l.before_mlp, l.eps, normed, team);
        multiply_adapted(B, *l.gate_up, normed, both, team);
        gated(B, inside, both, active, l.activation, team);
        multiply_adapted(B, *l.down, active, y, team);
        inner = l.after_mlp;
    }
    add_norm(B, d, x, y, inner, last, first.eps, out, team);
}

// Draws a token of each row by the inverse of the cumulative distribution, as sampler.inverse_cdf does: the first whose
// running sum exceeds uniform * total. Temperature 0: the likeliest token, with its probability at temperature 1.
static void draw_row(const float* logits, int64_t V, float temperature, double uniform, int64_t* token, float* logprob) {
    constexpr int64_t PART = 4 * W;
    const bool greedy = temperature == 0;
    const float scale = greedy ? 1 : temperature;
    auto some = [&](int64_t c) {  // W logits
        Vec v = load(logits + c, V - c);
        for (int64_t i = V - c; i < W; i++) v[i] = -INFINITY;
        return v;
    };
    Vec most = some(0);
    for (int64_t c = W; c < V; c += W) { Vec v = some(c); most = v > most ? v : most; }
    float top = most[0];
    for (int i = 1; i < W; i++) top = most[i] > top ? most[i] : top;
    auto weights = [&](int64_t c) { return exponential((some(c) - top) / scale); };
    static thread_local std::vector<double> memory;
    double* before = room(memory, (V + PART - 1) / PART + 1);
    double total = 0;
    for (int64_t c = 0, part = 0; c < V; c += PART, part++) {
        before[part] = total;
        Vec own = {};
        for (int64_t i = c; i < std::min(c + PART, V); i += W) own += weights(i);
        total += sum(own);
    }
    int64_t chosen = V - 1;
    if (greedy) {
        for (chosen = 0; chosen < V - 1 && logits[chosen] != top;) chosen++;
    } else if (total > 0) {
        const double wanted = uniform * total;
        int64_t part = std::upper_bound(before, before + (V + PART - 1) / PART, wanted) - before - 1;
        double rest = wanted - before[part], sum = 0;
        for (int64_t c = part * PART; c < std::min((part + 1) * PART, V); c += W) {
            Vec own = weights(c);
            for (int i = 0; i < W; i++)
                if (own[i] > 0) {
                    if (sum <= rest) chosen = c + i;
                    sum += own[i];
                }
        }
    }
    *token = chosen;
    *logprob = float((double)((logits[chosen] - top) / scale) - std::log(total));
}

static void draw_rows(int64_t rows, int64_t V, const float* logits, const float* temperatures, const double* uniforms, int64_t* tokens, float* logprobs) {
#pragma omp parallel for num_threads(threads()) if (rows > 1 && rows * V > ALONE)
    for (int64_t row = 0; row < rows; row++) draw_row(logits + row * V, V, temperatures[row], uniforms[row], tokens + row, logprobs + row);
}

// order, lengths: of the rows by block, and of their prompts; written: tokens of each row before this one; table: its row of
// the rotary tables, a cosine and a sine for each kind of layer.
static Tensor step(Tensor planes, Tensor starts, Tensor order, Tensor lengths, Tensor written, Tensor table, Tensor prompts, Tensor own, std::vector<Tensor> rotary) {
    Step* s = new Step();
    s->rows = written.size(0), s->kv_heads = planes.size(2), s->dim = planes.size(4), s->narrow_bank = narrow(planes);
    s->blocks = starts.size(0) - 1, s->starts = s->keep<int64_t>(starts), s->order = s->keep<int64_t>(order);
    s->prompt = s->keep<int64_t>(lengths), s->written = s->keep<int64_t>(written), s->table = s->keep<int64_t>(table);
    s->prompts = s->keep<int64_t>(prompts), s->prompts_width = prompts.size(1);
    s->own = s->keep<int64_t>(own), s->own_width = own.size(1);
    s->bank = {s->keep<void>(planes), planes.stride(0), planes.stride(1), planes.stride(2), planes.size(3)};
    for (const Tensor& t : rotary) s->rotary.push_back(s->keep<float>(t));
    return tensor_of(s);
}

static Tensor layer(int64_t index, int64_t heads, int64_t window, double scale, double softcap, double eps, int64_t rotary, int64_t activation,
                    Maybe q_norm, Maybe k_norm, Tensor before_attention, Maybe after_attention, Tensor before_mlp, Maybe after_mlp, std::vector<Tensor> products) {
    Layer* l = new Layer();
    l->plane = 2 * index, l->heads = heads, l->window = window, l->scale = scale, l->softcap = softcap, l->eps = eps;
    l->rotary = rotary, l->activation = activation;
    l->q_norm = l->keep<float>(q_norm), l->k_norm = l->keep<float>(k_norm);
    l->before_attention = l->keep<float>(before_attention), l->after_attention = l->keep<float>(after_attention);
    l->before_mlp = l->keep<float>(before_mlp), l->after_mlp = l->keep<float>(after_mlp);
    const Product** places[] = {&l->qkv, &l->out, &l->gate_up, &l->down};
    for (size_t i = 0; i < products.size(); i++) {
        *places[i] = &object_of<Product>(products[i]);
        l->tensors.push_back(products[i]);
    }
    return tensor_of(l);
}

static Tensor attended(Tensor step, Tensor layer, Tensor qkv) {
    const Step& s = object_of<Step>(step);
    const Layer& l = object_of<Layer>(layer);
    qkv = whole(qkv);
    const Tensor out = empty(qkv, {s.rows, l.heads * s.dim});
    by_type(narrow(qkv), [&](auto number) {
        using X = decltype(number);
        (s.narrow_bank ? attend<X, bfloat16> : attend<X, float>)(s, l, numbers<X>(qkv), numbers<X>(out));
    });
    return out;
}

static Tensor added_norm(Tensor x, Maybe y, Maybe inner, Tensor weight, double eps, bool narrow_rows) {
    const Tensor out = empty(x, {x.size(0), x.size(1)}, type_of(narrow_rows));
    const Maybe more = y ? Maybe(whole(*y)) : std::nullopt;
    by_type(narrow_rows, [&](auto number) {
        using X = decltype(number);
        add_norm(x.size(0), x.size(1), numbers<float>(x), numbers<X>(more), numbers<float>(inner), numbers<float>(weight), eps, numbers<X>(out), threads());
    });
    return out;
}

static Tensor activated_gate(Tensor x, int64_t activation) {
    x = whole(x);
    const Tensor out = empty(x, {x.size(0), x.size(1) / 2});
    by_type(narrow(x), [&](auto number) {
        using X = decltype(number);
        gated(x.size(0), x.size(1) / 2, numbers<X>(x), numbers<X>(out), activation, threads());
    });
    return out;
}

static std::vector<const Layer*> layers_of(const std::vector<Tensor>& layers) {
    std::vector<const Layer*> all;
    for (const Tensor& layer : layers) all.push_back(&object_of<Layer>(layer));
    return all;
}

static Tensor layers(Tensor step, std::vector<Tensor> layers, Tensor x, Tensor norm, bool narrow_rows) {
    const std::vector<const Layer*> all = layers_of(layers);
    const Tensor out = empty(x, {x.size(0), x.size(1)}, type_of(narrow_rows));
    by_type(narrow_rows, [&](auto number) {
        using X = decltype(number);
        run_layers(object_of<Step>(step), all, x.size(1), numbers<float>(x), numbers<float>(norm), numbers<X>(out));
    });
    return out;
}

// Numbers [N] in float32, filled up with zeros to whole panels.
static Tensor whole_panels(const Tensor& from, int64_t N) {
    const Tensor padded = torch::stable::new_zeros(from, {(N + PANEL - 1) / PANEL * PANEL}, ScalarType::Float);
    by_type(narrow(from), [&](auto number) {
        for (int64_t i = 0; i < N; i++) numbers<float>(padded)[i] = as_float(numbers<decltype(number)>(from)[i]);
    });
    return padded;
}

// A weight [N, K] in panels [N / PANEL, K, PANEL], the last one filled up with zeros like bias and scale, or as it is.
static Tensor product(Tensor weight, Maybe bias, Maybe scale, int64_t layout) {
    Product* p = new Product();
    p->outputs = weight.size(0), p->inputs = weight.size(1), p->layout = layout, p->type = weight.scalar_type();
    weight = whole(weight);
    if (scale) p->scale = p->keep<float>(whole_panels(*scale, p->outputs));
    if (layout == AS_IT_IS) {
        p->weight = p->keep<void>(weight), p->bias = p->keep<void>(bias);
        return tensor_of(p);
    }
    if (layout == HALVES || layout == BYTES) p->layout = PANELS, p->type = layout == BYTES ? ScalarType::Char : ScalarType::Half;
    const Tensor packed = empty(weight, {(p->outputs + PANEL - 1) / PANEL * PANEL * p->inputs}, p->type);
    const float* steps = p->scale;
    auto pack = [&](auto number, auto kept, auto as) {
        pack_panels(p->outputs, p->inputs, numbers<decltype(number)>(weight), numbers<decltype(kept)>(packed), threads(), as);
    };
    auto same = [](int64_t, Vec v) { return v; };
    in_large_pages(packed.data_ptr(), packed.numel() * packed.element_size());
    if (layout == PAIRS) pack_pairs(p->outputs, p->inputs, numbers<bfloat16>(weight), numbers<bfloat16>(packed), threads());
    else if (p->type == weight.scalar_type()) by_weight(p->type, [&](auto number) { pack(number, number, same); });
    else
        by_type(narrow(weight), [&](auto number) {
            if (layout == HALVES) pack(number, float16(), same);
            else pack(number, int8_t(), [=](int64_t n, Vec v) { return steps[n] > 0 ? nearest(v / steps[n]) : Vec{}; });
        });
    p->weight = p->keep<void>(packed);
    if (bias) p->bias = p->keep<void>(whole_panels(*bias, p->outputs));
    return tensor_of(p);
}

// The product with an adapter beside it, both of whose matrices are products of panels of float32.
static Tensor adapted(Tensor product, Tensor down, Tensor up) {
    Product* p = new Product(object_of<Product>(product));
    p->down = &object_of<Product>(down), p->up = &object_of<Product>(up);
    p->tensors.insert(p->tensors.end(), {down, up});
    return tensor_of(p);
}

// narrow_result: rows of bfloat16 give rows of bfloat16, else of float32.
static Tensor multiplied(Tensor product, Tensor x, bool narrow_result) {
    const Product& p = object_of<Product>(product);
    x = whole(x);
    const Tensor out = empty(x, {x.size(0), p.outputs}, type_of(narrow_result));
    if (!narrow(x)) multiply_adapted(x.size(0), p, numbers<float>(x), numbers<float>(out), threads());
    else by_type(narrow_result, [&](auto number) {
        multiply_adapted(x.size(0), p, numbers<bfloat16>(x), numbers<decltype(number)>(out), threads());
    });
    return out;
}

static std::tuple<Tensor, Tensor> draw(Tensor logits, Tensor temperatures, Tensor uniforms) {
    logits = whole(logits);
    const int64_t rows = logits.size(0);
    const Tensor tokens = empty(logits, {rows}, ScalarType::Long), logprobs = empty(logits, {rows});
    draw_rows(rows, logits.size(1), numbers<float>(logits), numbers<float>(temperatures), numbers<double>(uniforms), numbers<int64_t>(tokens), numbers<float>(logprobs));
    return {tokens, logprobs};
}

// x [B, d] = the embeddings [V, d] of tokens [B]
template <class T> static void embed(int64_t rows, int64_t d, const T* embeddings, const int64_t* tokens, float* x) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < d; c += W) store(x + row * d + c, load(embeddings + tokens[row] * d + c, d - c), d - c);
}

// Whether a row drew one of its tokens of stops [B, most], or from logits that are not numbers
static bool one_ends(int64_t rows, const int64_t* tokens, const float* logprobs, const Tensor& stops) {
    const int64_t most = stops.size(1), *stop = numbers<int64_t>(stops);
    for (int64_t row = 0; row < rows; row++, stop += most)
        if (std::isnan(logprobs[row]) || std::find(stop, stop + most, tokens[row]) != stop + most) return true;
    return false;
}

// Tokens and log-probabilities [n, B] of as many steps as there are uniforms [n, B], and how many were taken: none after one in
// which a row ended, or `called` [1] became another number than 0. The rows' last tokens [B] are computed first; stops [B, most]
// are the tokens that end each row.
static std::tuple<Tensor, Tensor, int64_t> decode(Tensor step, std::vector<Tensor> layers, Tensor norm, Tensor embeddings, Tensor head, Tensor last, Tensor temperatures, Tensor uniforms, Tensor stops, Tensor called, bool narrow_rows) {
    Step& s = object_of<Step>(step);
    const Product& p = object_of<Product>(head);
    embeddings = whole(embeddings), uniforms = whole(uniforms), stops = whole(stops);
    const int64_t B = s.rows, d = norm.size(0), V = p.outputs, most = uniforms.size(0);
    const Tensor x = empty(norm, {B, d}), states = empty(norm, {B, d}, type_of(narrow_rows)), logits = empty(norm, {B, V});
    const Tensor tokens = empty(last, {most, B}), logprobs = empty(norm, {most, B});
    const std::vector<const Layer*> all = layers_of(layers);
    const int64_t* from = numbers<int64_t>(last);
    const volatile int64_t* stop_now = numbers<int64_t>(called);  // another thread writes it
    int64_t done = 0;
    for (bool ended = false; done < most && !ended && !(done && *stop_now); done++) {
        int64_t* drawn = numbers<int64_t>(tokens) + done * B;
        float* logprob = numbers<float>(logprobs) + done * B;
        by_type(narrow(embeddings), [&](auto number) { embed(B, d, numbers<decltype(number)>(embeddings), from, numbers<float>(x)); });
        by_type(narrow_rows, [&](auto number) {
            using X = decltype(number);
            run_layers(s, all, d, numbers<float>(x), numbers<float>(norm), numbers<X>(states));
            multiply_adapted(B, p, numbers<X>(states), numbers<float>(logits), threads());
        });
        draw_rows(B, V, numbers<float>(logits), numbers<float>(temperatures), numbers<double>(uniforms) + done * B, drawn, logprob);
        ended = one_ends(B, drawn, logprob, stops);
        from = drawn;
        for (int64_t row = 0; row < B; row++) s.written[row]++, s.table[row]++;
    }
    return {tokens, logprobs, done};
}

static bool has_pairs() {  // whether the CPU multiplies pairs of bfloat16
    return MULTIPLIES_PAIRS;
}

static bool multiplies_tiles() {
#ifdef __AMX_BF16__
    return has_tiles();
#endif
    return false;
}

STABLE_TORCH_LIBRARY_FRAGMENT(tunesmith, m) {
    m.def("has_pairs() -> bool");
    m.def("has_tiles() -> bool");
    m.def("step(Tensor planes, Tensor starts, Tensor order, Tensor lengths, Tensor written, Tensor table, Tensor prompts, Tensor own, Tensor[] rotary) -> Tensor");
    m.def("layer(int index, int heads, int window, float scale, float softcap, float eps, int rotary, int activation, Tensor? q_norm, Tensor? k_norm, "
          "Tensor before_attention, Tensor? after_attention, Tensor before_mlp, Tensor? after_mlp, Tensor[] products) -> Tensor");
    m.def("layers(Tensor step, Tensor[] layers, Tensor(a!) x, Tensor norm, bool narrow) -> Tensor");
    m.def("attend(Tensor step, Tensor layer, Tensor qkv) -> Tensor");
    m.def("add_norm(Tensor(a!) x, Tensor? y, Tensor? inner, Tensor weight, float eps, bool narrow) -> Tensor");
    m.def("gated(Tensor x, int activation) -> Tensor");
    m.def("product(Tensor weight, Tensor? bias, Tensor? scale, int layout) -> Tensor");
    m.def("adapted(Tensor product, Tensor down, Tensor up) -> Tensor");
    m.def("multiply(Tensor product, Tensor x, bool narrow) -> Tensor");
    m.def("decode(Tensor step, Tensor[] layers, Tensor norm, Tensor embeddings, Tensor head, Tensor last, Tensor temperatures, Tensor uniforms, Tensor stops, Tensor called, bool narrow) "
          "-> (Tensor, Tensor, int)");
    m.def("draw(Tensor logits, Tensor temperatures, Tensor uniforms) -> (Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(tunesmith, CompositeExplicitAutograd, m) {
    m.impl("has_pairs", TORCH_BOX(&has_pairs));
    m.impl("has_tiles", TORCH_BOX(&multiplies_tiles));
}
STABLE_TORCH_LIBRARY_IMPL(tunesmith, CPU, m) {
    m.impl("step", TORCH_BOX(&step));
    m.impl("layer", TORCH_BOX(&layer));
    m.impl("layers", TORCH_BOX(&layers));
    m.impl("attend", TORCH_BOX(&attended));
    m.impl("add_norm", TORCH_BOX(&added_norm));
    m.impl("gated", TORCH_BOX(&activated_gate));
    m.impl("product", TORCH_BOX(&product));
    m.impl("adapted", TORCH_BOX(&adapted));
    m.impl("multiply", TORCH_BOX(&multiplied));
    m.impl("decode", TORCH_BOX(&decode));
    m.impl("draw", TORCH_BOX(&draw));
}
