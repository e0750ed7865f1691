// What a decode step computes between its large products, for rows of bfloat16 or float32; sums are float32.
//
// Shapes: B rows, H query heads, K key/value heads, G = H / K, D head size, d hidden size, f feed-forward size,
// V vocabulary. A bank of keys and values is [plane, row, K, slot, D]; plane 2 l are the keys of layer l, 2 l + 1 its
// values.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Int __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Half __attribute__((vector_size(32)));
struct bfloat16 { uint16_t bits; };
constexpr int W = 16;                // numbers in a vector
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
static inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
static inline void store(bfloat16* p, Vec v) {  // to the nearest, ties to even; NaN stays NaN
    Bits u = (Bits)v, rounded = u + 0x7fff + ((u >> 16) & 1);
    Half h = __builtin_convertvector((v == v ? rounded : u | 0x400000) >> 16, Half);
    std::memcpy(p, &h, sizeof h);
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
static inline float sum(Vec v) { float s = 0; for (int i = 0; i < W; i++) s += v[i]; return s; }

static inline Vec exponential(Vec x) {  // error below 2e-7 of the result; NaN stays NaN
    Vec scaled = x * 1.44269504f, bounded = scaled < -126.f ? Vec{} - 126.f : scaled > 127.f ? Vec{} + 127.f : scaled;
    Vec whole = (bounded + 12582912.f) - 12582912.f;
    Vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vec y = 1.f + r + r * r * (0.5f + r * (1.6666665459e-1f + r * (4.1665795894e-2f + r * (8.3334519073e-3f
          + r * (1.3981999507e-3f + r * 1.9875691500e-4f)))));
    y *= (Vec)((__builtin_convertvector(whole, Int) + 127) << 23);
    return x < LEAST ? Vec{} : x > 88.7f ? Vec{} + INFINITY : y;
}
static inline Vec hyperbolic_tangent(Vec x) { return 1.f - 2.f / (exponential(2.f * x) + 1.f); }

static inline Vec fold(Vec* a) {  // the sums of 16 vectors
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
        for (int i = 0; i < Q; i++)
            for (int j = 0; j < S && s + j < n; j++) out[i * out_step + s + j] = found[i * S + j];
    }
}

// out[i] += sum over s of w[i][s] v[s] of n rows v; out is padded to a multiple of 2 W.
template <int Q, bool Whole, class T>
static __attribute__((noinline)) void mix(const float* w, int64_t w_step, const T* v, int64_t v_step, int64_t n, int64_t d,
                                          float* out, int64_t out_step) {
    for (int64_t c = 0; c < d; c += 2 * W) {
        Vec a[Q][2];
        for (int i = 0; i < Q; i++)
            for (int h = 0; h < 2; h++) a[i][h] = load(out + i * out_step + c + h * W);
        for (int64_t s = 0; s < n; s++)
            for (int h = 0; h < 2; h++) {
                const T* row = v + s * v_step + c + h * W;
                Vec x = Whole ? load(row) : load(row, std::max<int64_t>(d - c - h * W, 0));
                for (int i = 0; i < Q; i++) a[i][h] += w[i * w_step + s] * x;
            }
        for (int i = 0; i < Q; i++)
            for (int h = 0; h < 2; h++) store(out + i * out_step + c + h * W, a[i][h]);
    }
}

template <class F> static void by_queries(int64_t queries, F f) {  // f(first, how many as a constant)
    int64_t at = 0;
    for (; queries - at >= 8; at += 8) f(at, std::integral_constant<int, 8>());
    if (queries - at >= 4) f(at, std::integral_constant<int, 4>()), at += 4;
    if (queries - at >= 2) f(at, std::integral_constant<int, 2>()), at += 2;
    if (queries - at >= 1) f(at, std::integral_constant<int, 1>());
}

template <class T> static void all_dots(int64_t queries, const float* q, int64_t q_step, const T* k, int64_t n, int64_t d, float* out, int64_t out_step) {
    by_queries(queries, [&](int64_t i, auto size) {
        constexpr int Q = decltype(size)::value;
        (d % W ? dots<Q, false, T> : dots<Q, true, T>)(q + i * q_step, q_step, k, d, n, d, out + i * out_step, out_step);
    });
}

template <class T> static void all_mix(int64_t queries, const float* w, int64_t w_step, const T* v, int64_t n, int64_t d, float* out, int64_t out_step) {
    by_queries(queries, [&](int64_t i, auto size) {
        constexpr int Q = decltype(size)::value;
        (d % (2 * W) ? mix<Q, false, T> : mix<Q, true, T>)(w + i * w_step, w_step, v, d, n, d, out + i * out_step, out_step);
    });
}

extern "C" {

struct Bank { void* data; int64_t plane, row, head; };  // steps in numbers; a slot's is D

struct Step {
    int64_t rows, heads, kv_heads, dim, threads, narrow_rows, narrow_bank;
    int64_t blocks;             // rows of one prompt that are computed together
    const int64_t* starts;      // [blocks + 1] of `order`
    const int64_t* order;       // [B], rows by block
    const int64_t* prompt_row;  // [B]
    const int64_t* prompt;      // [B] tokens of the prompt
    const int64_t* written;     // [B] tokens of the row before this one
    const int64_t* table;       // [B] row of the rotary tables
    Bank prompts, own;
};

struct Layer {
    int64_t plane, window;      // window 0: none
    float scale, softcap, eps;  // softcap 0: none
    const float *q_norm, *k_norm;  // [D], or null
    const float *cos, *sin;        // [tokens, D], the first half of sin negated; or null
};

}  // extern "C"

// A head of queries or keys of a row: normed, rotated, times `factor`; out is padded with zeros.
template <class X>
static void prepare(const Step& s, const Layer& l, const X* x, const float* norm, int64_t row, float factor, float* out) {
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
    if (!l.cos) return;
    const float *cos = l.cos + s.table[row] * D, *sin = l.sin + s.table[row] * D;
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

// One key/value head of the rows of a block: writes their keys and values, and attends.
template <class X, class T>
static void attend_block(const Step& s, const Layer& l, const X* qkv, X* out, int64_t block, int64_t head) {
    const int64_t D = s.dim, G = s.heads / s.kv_heads, padded = (D + 2 * W - 1) / (2 * W) * (2 * W);
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
    memory.assign((2 * queries + 1) * padded, 0.f);
    memory.resize((2 * queries + 1) * padded + queries * (width + 1));
    float *q = memory.data(), *mixed = q + queries * padded, *key = mixed + queries * padded, *totals = key + padded, *scores = totals + queries;
    const int64_t place = l.plane * s.prompts.plane + s.prompt_row[rows[0]] * s.prompts.row + head * s.prompts.head;
    const T* shared = (const T*)s.prompts.data + place + first * D;
    auto own_of = [&](int64_t row) { return (T*)s.own.data + l.plane * s.own.plane + row * s.own.row + head * s.own.head; };
    for (int64_t m = 0; m < count; m++) {
        const int64_t row = rows[m], slot = s.written[row], begin = std::max<int64_t>(begin_of(row) - prompt, 0);
        const X *x = qkv + row * (s.heads + 2 * s.kv_heads) * D, *value = x + (s.heads + s.kv_heads + head) * D;
        T* keys = own_of(row);
        prepare(s, l, x + (s.heads + head) * D, l.k_norm, row, 1, key);
        for (int64_t c = 0; c < D; c += W) {
            store(keys + slot * D + c, load(key + c), D - c);
            store(keys + s.own.plane + slot * D + c, load(value + c, D - c), D - c);
        }
        for (int64_t g = 0; g < G; g++) prepare(s, l, x + (head * G + g) * D, l.q_norm, row, l.scale, q + (m * G + g) * padded);
        all_dots(G, q + m * G * padded, padded, keys + begin * D, slot + 1 - begin, D, scores + m * G * width + prompt + begin, width);
    }
    all_dots(queries, q, padded, shared, prompt - first, D, scores + first, width);
    for (int64_t i = 0; i < queries; i++) {
        const int64_t row = rows[i / G], begin = begin_of(row), n = prompt + s.written[row] + 1 - begin;
        float* own = scores + i * width + begin;
        if (l.softcap)
            for (int64_t c = 0; c < n; c += W) store(own + c, hyperbolic_tangent(load(own + c) / l.softcap) * l.softcap);
        totals[i] = exponentials(own, n);
        std::fill(scores + i * width + std::min(first, begin), own, 0.f);
    }
    all_mix(queries, scores + first, width, shared + s.prompts.plane, prompt - first, D, mixed, padded);
    for (int64_t m = 0; m < count; m++) {
        const int64_t row = rows[m], begin = std::max<int64_t>(begin_of(row) - prompt, 0);
        const T* values = own_of(row) + s.own.plane + begin * D;
        all_mix(G, scores + m * G * width + prompt + begin, width, values, s.written[row] + 1 - begin, D, mixed + m * G * padded, padded);
        for (int64_t g = 0; g < G; g++)
            for (int64_t c = 0; c < D; c += W)
                store(out + (row * s.heads + head * G + g) * D + c, load(mixed + (m * G + g) * padded + c) / totals[m * G + g], D - c);
    }
}

template <class X, class T> static void attend(const Step& s, const Layer& l, const X* qkv, X* out) {
    int64_t tokens = 0;
    for (int64_t row = 0; row < s.rows; row++) tokens += s.prompt[row] + s.written[row] + 8;
    const int64_t work = s.blocks * s.kv_heads;
#pragma omp parallel for num_threads(s.threads) schedule(dynamic, 1) if (work > 1 && tokens * s.heads * s.dim > ALONE)
    for (int64_t i = 0; i < work; i++) attend_block<X, T>(s, l, qkv, out, i / s.kv_heads, i % s.kv_heads);
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

extern "C" {

void tunesmith_attend(const Step* s, const Layer* l, const void* qkv, void* out) {
    if (s->narrow_rows && s->narrow_bank) attend<bfloat16, bfloat16>(*s, *l, (const bfloat16*)qkv, (bfloat16*)out);
    else if (s->narrow_rows) attend<bfloat16, float>(*s, *l, (const bfloat16*)qkv, (bfloat16*)out);
    else if (s->narrow_bank) attend<float, bfloat16>(*s, *l, (const float*)qkv, (float*)out);
    else attend<float, float>(*s, *l, (const float*)qkv, (float*)out);
}

void tunesmith_add_norm(const Step* s, int64_t d, float* x, const void* y, const float* inner, const float* weight, float eps, void* out) {
    if (s->narrow_rows) add_norm(s->rows, d, x, (const bfloat16*)y, inner, weight, eps, (bfloat16*)out, s->threads);
    else add_norm(s->rows, d, x, (const float*)y, inner, weight, eps, (float*)out, s->threads);
}

void tunesmith_gated(const Step* s, int64_t f, const void* x, void* out, int64_t kind) {
    if (s->narrow_rows) gated(s->rows, f, (const bfloat16*)x, (bfloat16*)out, kind, s->threads);
    else gated(s->rows, f, (const float*)x, (float*)out, kind, s->threads);
}

}  // extern "C"
