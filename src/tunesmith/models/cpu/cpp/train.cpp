// What a training step computes slower with PyTorch's operations; sums are float32. Products of bfloat16 rows: operands
// are packed into AMX's tiles, which AVX-512 multiplies pair by pair where there is no AMX.
//
// Shapes: T rows, N outputs and K inputs of a linear module; H query heads, K key/value heads, G = H / K, D head size.
#include "attention.h"
#include "layers.h"
#include "logits.h"
#include "operations.h"
#include "products.h"
#include "vectors.h"

#ifdef __AVX512BF16__
constexpr int64_t TILE = 512;  // numbers of a tile: 16 rows of the left operand with 32 places of the sum, or 16 pairs of
                               // places of the right operand with 16 columns
constexpr int64_t PLACES = 2 * W;

// Pairs of places of 16 columns, from rows that are places, n of which are there.
static inline void interleave(const bfloat16* x, int64_t step, int64_t n, Vec* pairs) {
    auto row = [&](int64_t i) {
        Half h = {};
        if (i < n) std::memcpy(&h, x + i * step, sizeof h);
        return __builtin_convertvector(h, Bits);
    };
    for (int i = 0; i < W; i++) pairs[i] = (Vec)(row(2 * i) | row(2 * i + 1) << 16);
}

// Tiles [columns / 16][steps] of the right operand x [places, columns].
static void pack_right(const bfloat16* x, int64_t step, int64_t places, int64_t column, int64_t steps, bfloat16* tiles) {
    for (int64_t s = 0; s < steps; s++) {
        Vec pairs[W];
        interleave(x + s * PLACES * step + column, step, places - s * PLACES, pairs);
        std::memcpy(tiles + s * TILE, pairs, sizeof pairs);
    }
}

// Tiles [steps] of 16 columns of x [places, columns] as rows of the left operand.
static void pack_left(const bfloat16* x, int64_t step, int64_t places, int64_t column, int64_t steps, bfloat16* tiles) {
    for (int64_t s = 0; s < steps; s++) {
        Vec pairs[W];
        interleave(x + s * PLACES * step + column, step, places - s * PLACES, pairs);
        transpose(pairs);
        std::memcpy(tiles + s * TILE, pairs, sizeof pairs);
    }
}

#ifndef __AMX_BF16__
// As below.
template <int A, int B>
static void multiply(const bfloat16* left, int64_t left_step, const bfloat16* right, int64_t right_step, int64_t steps, float* out, int64_t out_step, bool add) {
    constexpr int TALL = 8;  // rows whose sums stay in registers
    for (int64_t a = 0; a < A * W; a += TALL, out += TALL * out_step) {
        const bfloat16* rows = left + a / W * left_step + a % W * PLACES;
        Vec sums[TALL][B];
        for (int r = 0; r < TALL; r++)
            for (int b = 0; b < B; b++) sums[r][b] = add ? load(out + r * out_step + b * W) : Vec{};
        for (int64_t s = 0; s < steps; s++)
            for (int64_t p = 0; p < W; p++)
                for (int r = 0; r < TALL; r++)
                    for (int b = 0; b < B; b++)
                        sums[r][b] = add_pair(sums[r][b], rows + s * TILE + r * PLACES + 2 * p, load_pairs(right + b * right_step + s * TILE + p * PLACES));
        for (int r = 0; r < TALL; r++)
            for (int b = 0; b < B; b++) store(out + r * out_step + b * W, sums[r][b]);
    }
}
#else

// out [16 A, 16 B] = or += the products of packed operands.
template <int A, int B>
static void multiply(const bfloat16* left, int64_t left_step, const bfloat16* right, int64_t right_step, int64_t steps, float* out, int64_t out_step, bool add) {
    const int64_t bytes = out_step * sizeof(float);
    if (add) {
        _tile_loadd(0, out, bytes);
        if (B > 1) _tile_loadd(1, out + W, bytes);
        if (A > 1) _tile_loadd(2, out + W * out_step, bytes);
        if (A > 1 && B > 1) _tile_loadd(3, out + W * out_step + W, bytes);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; s++) {
        _tile_loadd(4, left + s * TILE, 64);
        _tile_loadd(6, right + s * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (B > 1) { _tile_loadd(7, right + right_step + s * TILE, 64); _tile_dpbf16ps(1, 4, 7); }
        if (A > 1) {
            _tile_loadd(5, left + left_step + s * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            if (B > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, out, bytes);
    if (B > 1) _tile_stored(1, out + W, bytes);
    if (A > 1) _tile_stored(2, out + W * out_step, bytes);
    if (A > 1 && B > 1) _tile_stored(3, out + W * out_step + W, bytes);
}
#endif

// As above for `tall` and `wide` tiles of 16; the right operand's part that the products share stays in the cache.
static void multiply_block(const bfloat16* left, int64_t tall, int64_t left_step, const bfloat16* right, int64_t wide, int64_t right_step, int64_t steps, float* out, int64_t out_step, bool add) {
    for (int64_t b = 0; b < wide; b += 2)
        for (int64_t a = 0; a < tall; a += 2) {
            const bool two = tall - a > 1, both = wide - b > 1;
            (two ? both ? multiply<2, 2> : multiply<2, 1> : both ? multiply<1, 2> : multiply<1, 1>)(
                left + a * left_step, left_step, right + b * right_step, right_step, steps, out + a * W * out_step + b * W, out_step, add);
        }
}

struct Sum { float* sum; int64_t rows, adds; };  // [rows, K]; adds: to what is there

constexpr int64_t DEPTH = 16;  // steps whose operands' tiles stay in the first cache: 512 places

// The sums, one below the other [N, K], of grad [T, N] transposed times x [T, K]; N and K are multiples of 16.
static void weight_gradient(int64_t T, int64_t K, const bfloat16* grad, int64_t grad_step, const bfloat16* x, int64_t x_step, const Sum* sums, int64_t count, int64_t threads) {
    constexpr int64_t MOST = 2048;  // rows at a time
    static thread_local std::vector<bfloat16> shared;
    bfloat16* right = room(shared, K * std::min(T + PLACES, MOST));
    for (int64_t from = 0; from < T; from += MOST) {
        const int64_t rows = std::min(MOST, T - from), steps = (rows + PLACES - 1) / PLACES;
#pragma omp parallel num_threads(threads)
        {
            static thread_local std::vector<bfloat16> memory;
            configure_tiles();
#pragma omp for
            for (int64_t k = 0; k < K / W; k++) pack_right(x + from * x_step, x_step, rows, k * W, steps, right + k * steps * TILE);
            int64_t column = 0;
            for (int64_t i = 0; i < count; column += sums[i].rows, i++) {
                const Sum& part = sums[i];
                const int64_t all = part.rows / W, tall = all >= 32 * threads ? 8 : 2;
                bfloat16* left = room(memory, tall * steps * TILE);
#pragma omp for nowait
                for (int64_t m = 0; m < all; m += tall) {
                    const int64_t here = std::min(tall, all - m);
                    for (int64_t a = 0; a < here; a++)
                        pack_left(grad + from * grad_step, grad_step, rows, column + (m + a) * W, steps, left + a * steps * TILE);
                    for (int64_t s = 0; s < steps; s += DEPTH)
                        multiply_block(left + s * TILE, here, steps * TILE, right + s * TILE, K / W, steps * TILE,
                                       std::min(DEPTH, steps - s), part.sum + m * W * K, K, part.adds || from || s);
                }
            }
            release_tiles();
        }
    }
}

struct Rows { const bfloat16* at; int64_t step; };                            // [T, heads, D]
struct Attention {
    Rows q, k, v, out, grad;
    const float* lse;                      // [H, T]
    bfloat16 *grad_q, *grad_k, *grad_v;    // [T, heads, D]
    int64_t T, H, K, D;
    float scale;
};

constexpr int64_t BLOCK = 2 * W;  // rows of queries or keys at a time; a segment's last block is filled up with zeros

// Tiles [2][D / 32] of a block's rows: as they are for the left operand, or for the right one as its columns.
static void pack_rows(const bfloat16* x, int64_t step, int64_t n, int64_t D, bool columns, bfloat16* tiles) {
    for (int64_t m = 0; m < BLOCK; m += W)
        for (int64_t c = 0; c < D; c += PLACES, tiles += TILE) {
            Vec words[W];
            for (int64_t i = 0; i < W; i++) {
                words[i] = Vec{};
                if (m + i < n) std::memcpy(&words[i], x + (m + i) * step + c, sizeof(Vec));
            }
            if (columns) transpose(words);
            std::memcpy(tiles, words, sizeof words);
        }
}

// out [T, N] of float32 = x [T, K] times the weight [N, K] (turned: [K, N]); N is a multiple of 16 and K of 32, and out has
// whole tiles of rows.
static void multiply_pairs(int64_t T, int64_t N, int64_t K, const bfloat16* x, int64_t x_step, const bfloat16* weight, int64_t step, bool turned, float* out, int64_t threads) {
    constexpr int64_t MOST = 256;  // tiles of an operand that stay in the second cache
    const int64_t steps = K / PLACES, tall = (T + W - 1) / W, wide = N / W, size = steps * TILE;
    const int64_t together = std::max<int64_t>(2, std::min(MOST / steps, (wide + threads - 1) / threads)) / 2 * 2;
    static thread_local std::vector<bfloat16> shared;
    bfloat16* left = room(shared, (tall + 1) * size);
#pragma omp parallel num_threads(threads)
    {
        static thread_local std::vector<bfloat16> memory;
        bfloat16* right = room(memory, (together + 1) * size);
        configure_tiles();
#pragma omp for
        for (int64_t t = 0; t < tall; t += 2) pack_rows(x + t * W * x_step, x_step, T - t * W, K, false, left + t * size);
#pragma omp for
        for (int64_t n = 0; n < wide; n += together) {
            const int64_t here = std::min(together, wide - n);
            for (int64_t b = 0; turned && b < here; b++) pack_right(weight, step, K, (n + b) * W, steps, right + b * size);
            for (int64_t b = 0; !turned && b < here; b += 2) pack_rows(weight + (n + b) * W * step, step, (here - b) * W, K, true, right + b * size);
            for (int64_t s = 0; s < steps; s += DEPTH)
                multiply_block(left + s * TILE, tall, size, right + s * TILE, here, size, std::min(DEPTH, steps - s), out + n * W, N, s);
        }
        release_tiles();
    }
}

struct Block { int64_t row, n, last; };  // its first row and number of rows; the end of the blocks that see it

// Gradients of one key/value head and its queries in the segments [first, end), which no other sees.
static void attend_backward(const Segments& f, const Attention& a, int64_t first, int64_t end, int64_t head) {
    const int64_t D = a.D, G = a.H / a.K, size = BLOCK * D, half = size / 2, wide = D / W;
    static thread_local std::vector<Block> blocks;
    static thread_local std::vector<bfloat16> packed;
    static thread_local std::vector<float> memory;
    blocks.clear();
    for (int64_t s = first; s < end; s++)
        for (int64_t r = 0; r < f.lengths[s]; r += BLOCK) blocks.push_back({f.starts[s] + r, std::min(BLOCK, f.lengths[s] - r), f.lasts[s]});
    const int64_t count = blocks.size();
    for (Block& b : blocks)
        b.last = std::lower_bound(blocks.begin(), blocks.end(), b.last, [](const Block& x, int64_t row) { return x.row < row; }) - blocks.begin();
    bfloat16 *key_columns = room(packed, count * size * (3 + 4 * G)), *value_columns = key_columns + count * size, *keys = value_columns + count * size;
    bfloat16 *query_rows = keys + count * size, *grad_rows = query_rows + G * count * size, *queries = grad_rows + G * count * size;
    bfloat16* grads = queries + G * count * size;
    float *grad_q = room(memory, G * count * (size + 2 * BLOCK) + 2 * size), *lse = grad_q + G * count * size, *delta = lse + G * count * BLOCK;
    float *grad_k = delta + G * count * BLOCK, *grad_v = grad_k + size;
    std::fill(grad_q, lse, 0.f);
    for (int64_t b = 0; b < count; b++) {
        const int64_t row = blocks[b].row, n = blocks[b].n;
        const bfloat16 *k = a.k.at + row * a.k.step + head * D, *v = a.v.at + row * a.v.step + head * D;
        pack_rows(k, a.k.step, n, D, true, key_columns + b * size);
        pack_rows(v, a.v.step, n, D, true, value_columns + b * size);
        for (int64_t c = 0; c < wide; c++) pack_right(k, a.k.step, n, c * W, 1, keys + b * size + c * TILE);
        for (int64_t g = 0; g < G; g++) {
            const int64_t at = g * count + b, own = (head * G + g) * D;
            const bfloat16 *q = a.q.at + row * a.q.step + own, *out = a.out.at + row * a.out.step + own, *grad = a.grad.at + row * a.grad.step + own;
            pack_rows(q, a.q.step, n, D, false, query_rows + at * size);
            pack_rows(grad, a.grad.step, n, D, false, grad_rows + at * size);
            for (int64_t c = 0; c < wide; c++) {
                pack_left(q, a.q.step, n, c * W, 1, queries + at * size + c * TILE);
                pack_left(grad, a.grad.step, n, c * W, 1, grads + at * size + c * TILE);
            }
            for (int64_t i = 0; i < BLOCK; i++) {
                Vec product = {};
                if (i < n)
                    for (int64_t c = 0; c < D; c += W) product += load(grad + i * a.grad.step + c) * load(out + i * a.out.step + c);
                delta[at * BLOCK + i] = sum(product);
                lse[at * BLOCK + i] = i < n ? a.lse[(head * G + g) * a.T + row + i] : INFINITY;
            }
        }
    }
    alignas(64) float scores[BLOCK * BLOCK], slopes[BLOCK * BLOCK];
    alignas(64) bfloat16 shares[2 * TILE], pairs[2 * TILE], rows[2 * TILE];
    const Int place = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t b = 0; b < count; b++) {
        std::fill(grad_k, grad_v + size, 0.f);
        for (int64_t g = 0; g < G; g++)
            for (int64_t i = b; i < blocks[b].last; i++) {
                const int64_t at = g * count + i;
                multiply<2, 2>(query_rows + at * size, half, key_columns + b * size, half, D / PLACES, scores, BLOCK, false);
                multiply<2, 2>(grad_rows + at * size, half, value_columns + b * size, half, D / PLACES, slopes, BLOCK, false);
                for (int64_t r = 0; r < BLOCK; r += 2)
                    for (int64_t c = 0; c < 2; c++) {
                        Half p[2], d[2];
                        for (int64_t j = 0; j < 2; j++) {
                            const int64_t row = r + j, from = row * BLOCK + c * W;
                            Vec share = exponential(load(scores + from) * a.scale - lse[at * BLOCK + row]);
                            share = place + int(c * W) < int(i == b ? row + 1 : blocks[b].n) ? share : Vec{};
                            p[j] = narrow(share);
                            d[j] = narrow(share * (load(slopes + from) - delta[at * BLOCK + row]) * a.scale);
                            std::memcpy(rows + row / W * TILE + row % W * PLACES + c * W, &d[j], sizeof(Half));
                        }
                        auto both = [](const Half* h) { return __builtin_convertvector(h[0], Bits) | __builtin_convertvector(h[1], Bits) << 16; };
                        const Bits share = both(p), slope = both(d);
                        std::memcpy(shares + c * TILE + r * W, &share, sizeof share);
                        std::memcpy(pairs + c * TILE + r * W, &slope, sizeof slope);
                    }
                multiply_block(grads + at * size, wide, TILE, shares, 2, TILE, 1, grad_v, BLOCK, true);
                multiply_block(queries + at * size, wide, TILE, pairs, 2, TILE, 1, grad_k, BLOCK, true);
                multiply_block(rows, 2, TILE, keys + b * size, wide, TILE, 1, grad_q + at * size, D, true);
            }
        for (int64_t c = 0; c < D; c += W)
            for (int64_t from = 0; from < blocks[b].n; from += W)
                for (auto [sums, to] : {std::pair(grad_k, a.grad_k), std::pair(grad_v, a.grad_v)}) {
                    Vec v[W];
                    for (int64_t i = 0; i < W; i++) v[i] = load(sums + (c + i) * BLOCK + from);
                    transpose(v);
                    for (int64_t i = 0; i < W && from + i < blocks[b].n; i++) store(to + ((blocks[b].row + from + i) * a.K + head) * D + c, v[i]);
                }
    }
    for (int64_t g = 0; g < G; g++)
        for (int64_t b = 0; b < count; b++)
            for (int64_t i = 0; i < blocks[b].n; i++)
                for (int64_t c = 0; c < D; c += W)
                    store(a.grad_q + ((blocks[b].row + i) * a.H + head * G + g) * D + c, load(grad_q + (g * count + b) * size + i * D + c));
}

static void attend_backward(const Segments& f, const Attention& a, int64_t threads) {
    const std::vector<int64_t> roots = f.roots();
    const int64_t work = (int64_t(roots.size()) - 1) * a.K;
#pragma omp parallel num_threads(threads)
    {
        configure_tiles();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < work; i++) attend_backward(f, a, roots[i / a.K], roots[i / a.K + 1], i % a.K);
        release_tiles();
    }
}
#endif

// Each head's numbers are side by side, and so are the heads.
static Tensor heads_in_rows(const Tensor& t) {
    return t.stride(2) == 1 && t.stride(1) == t.size(2) ? t : torch::stable::contiguous(t);
}

static Segments segments_of(const Tensor& table) {
    const int64_t count = table.size(1), *starts = numbers<int64_t>(table);
    return {count, starts, starts + count, starts + 2 * count};
}

static Forest forest_of(const Tensor& table, const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
    const int64_t skipped = k.size(0) - q.size(0);
    auto rows = [](const Tensor& t, int64_t before) { return HeadRows{numbers<float>(t) - before * t.stride(0), t.stride(0)}; };
    return {segments_of(table), rows(q, skipped), rows(k, 0), rows(v, 0), q.size(0), q.size(1), k.size(1), q.size(2), float(scale), skipped};
}

// Where there are fewer queries than keys, they are of the last rows.
static std::tuple<Tensor, Tensor> attend_forest(Tensor table, Tensor q, Tensor k, Tensor v, double scale) {
    table = whole(table);
    for (Tensor* t : {&q, &k, &v}) *t = heads_in_rows(*t);
    const Tensor out = empty(q, {q.size(0), q.size(1), q.size(2)}), lse = empty(q, {q.size(1), q.size(0)});
    const Forest f = forest_of(table, q, k, v, scale);
    float *mixed = numbers<float>(out) - f.skipped * f.H * f.D, *totals = numbers<float>(lse) - f.skipped;
    by_trees(f, threads(), [&](int64_t first, int64_t end, int64_t head) { attend_tree(f, first, end, head, mixed, totals); });
    return {out, lse};
}

static std::tuple<Tensor, Tensor, Tensor> attend_forest_backward(Tensor table, Tensor q, Tensor k, Tensor v, Tensor out, Tensor grad, Tensor lse, double scale) {
    table = whole(table), lse = whole(lse);
    for (Tensor* t : {&q, &k, &v, &out, &grad}) *t = heads_in_rows(*t);
    const Forest f = forest_of(table, q, k, v, scale);
    auto gradient = [&] { return empty(q, {f.T, f.H, f.D}); };
    const Tensor grad_q = gradient(), grad_k = gradient(), grad_v = gradient();
    const Slopes g{{numbers<float>(out), out.stride(0)}, {numbers<float>(grad), grad.stride(0)}, numbers<float>(lse),
                   numbers<float>(grad_q), numbers<float>(grad_k), numbers<float>(grad_v)};
    by_trees(f, threads(), [&](int64_t first, int64_t end, int64_t head) { attend_tree_backward(f, g, first, end, head); });
    return {grad_q, grad_k, grad_v};
}

// x [T, K] of float32 times the weight [N, K] (turned: [K, N])
static Tensor multiplied_rows(Tensor x, Tensor weight, bool turned) {
    x = in_rows(x), weight = in_rows(weight);
    const int64_t N = weight.size(turned), K = x.size(1);
    STD_TORCH_CHECK(weight.size(!turned) == K, "rows have another number of inputs than the weight");
    const Tensor out = empty(x, {x.size(0), N});
    multiply_many(x.size(0), N, K, numbers<float>(x), x.stride(0), numbers<float>(weight), weight.stride(0), turned, numbers<float>(out), threads());
    return out;
}

#ifdef __AVX512BF16__
// As `multiplied_rows`, of bfloat16.
static Tensor multiplied_pairs(Tensor x, Tensor weight, bool turned) {
    x = in_rows(x), weight = in_rows(weight);
    const int64_t T = x.size(0), N = weight.size(turned), K = x.size(1);
    STD_TORCH_CHECK(weight.size(!turned) == K && K % PLACES == 0 && N % W == 0, "the weight's sides are multiples of 32");
    Tensor out = empty(x, {(T + W - 1) / W * W, N}, ScalarType::Float);
    multiply_pairs(T, N, K, numbers<bfloat16>(x), x.stride(0), numbers<bfloat16>(weight), weight.stride(0), turned, numbers<float>(out), threads());
    return torch::stable::narrow(out, 0, 0, T);
}
#endif

static void weight_gradients(Tensor grad, Tensor x, std::vector<Tensor> sums, std::vector<int64_t> adds) {
    grad = in_rows(grad), x = in_rows(x);
    for (size_t i = 0; i < sums.size() && !x.size(0); i++)
        if (!adds[i]) std::fill_n(numbers<float>(sums[i]), sums[i].numel(), 0.f);
    if (!narrow(x)) {
        int64_t column = 0;
        for (size_t i = 0; i < sums.size(); column += sums[i].size(0), i++)
            gradient_of_weight(x.size(0), sums[i].size(0), x.size(1), numbers<float>(grad) + column, grad.stride(0), numbers<float>(x), x.stride(0),
                               numbers<float>(sums[i]), adds[i], threads());
        return;
    }
#ifdef __AVX512BF16__
    std::vector<Sum> parts;
    for (size_t i = 0; i < sums.size(); i++) parts.push_back({numbers<float>(sums[i]), sums[i].size(0), adds[i]});
    weight_gradient(x.size(0), x.size(1), numbers<bfloat16>(grad), grad.stride(0), numbers<bfloat16>(x), x.stride(0), parts.data(), parts.size(), threads());
#endif
}

#ifdef __AVX512BF16__
static std::tuple<Tensor, Tensor, Tensor> attention_backward(Tensor table, Tensor q, Tensor k, Tensor v, Tensor out, Tensor grad, Tensor lse, double scale) {
    table = whole(table), lse = whole(lse);
    for (Tensor* t : {&q, &k, &v, &out, &grad}) *t = heads_in_rows(*t);
    auto rows = [](const Tensor& t) { return Rows{numbers<bfloat16>(t), t.stride(0)}; };
    auto gradient = [](const Tensor& t) { return empty(t, {t.size(0), t.size(1), t.size(2)}); };
    const Tensor grad_q = gradient(q), grad_k = gradient(k), grad_v = gradient(v);
    attend_backward(segments_of(table),
                    Attention{rows(q), rows(k), rows(v), rows(out), rows(grad), numbers<float>(lse), numbers<bfloat16>(grad_q),
                              numbers<bfloat16>(grad_k), numbers<bfloat16>(grad_v), q.size(0), q.size(1), k.size(1), q.size(2), float(scale)},
                    threads());
    return {grad_q, grad_k, grad_v};
}
#endif

using Two = std::tuple<Tensor, Maybe>;

static std::tuple<Tensor, Tensor> norm(Tensor x, Tensor weight, double eps, bool offset) {
    x = in_rows(x);
    const Tensor y = empty(x, {x.size(0), x.size(1)}), scales = empty(x, {x.size(0)}, ScalarType::Float);
    by_type(narrow(x), [&](auto number) {
        using X = decltype(number);
        norm_rows(x.size(0), x.size(1), numbers<X>(x), x.stride(0), Norm<X>{numbers<X>(weight), float(eps), offset}, numbers<X>(y),
                  numbers<float>(scales), threads());
    });
    return {y, scales};
}

// weighs: whether the weight has a gradient, of float32.
static Two norm_backward(Tensor x, Tensor grad, Tensor weight, Tensor scales, double eps, bool offset, bool weighs) {
    x = in_rows(x), grad = in_rows(grad);
    const Tensor grad_x = empty(x, {x.size(0), x.size(1)});
    const Maybe grad_weight = weighs ? Maybe(empty(x, {x.size(1)}, ScalarType::Float)) : std::nullopt;
    by_type(narrow(x), [&](auto number) {
        using X = decltype(number);
        norm_rows_backward(x.size(0), x.size(1), numbers<X>(x), x.stride(0), numbers<X>(grad), grad.stride(0),
                           Norm<X>{numbers<X>(weight), float(eps), offset}, numbers<float>(scales), numbers<X>(grad_x),
                           numbers<float>(grad_weight), threads());
    });
    return {grad_x, grad_weight};
}

// f(heads): of queries, keys and values x, and of the weights of the norms, of which there are two or none.
template <class F>
static void with_heads(const Maybe& x, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& weights, int64_t heads, int64_t kv_heads, double eps, bool offset, F f) {
    const Tensor own_cos = whole(cos), own_sin = whole(sin);
    by_type(narrow(cos), [&](auto number) {
        using X = decltype(number);
        std::vector<Norm<X>> norms;
        for (const Tensor& weight : weights) norms.push_back({numbers<X>(weight), float(eps), offset});
        f(Heads<X>{numbers<X>(x), numbers<X>(own_cos), numbers<X>(own_sin), weights.empty() ? nullptr : norms.data(), cos.size(0),
                   x ? x->stride(0) : 0, heads, kv_heads, cos.size(cos.dim() - 1)});
    });
}

static std::tuple<Tensor, Tensor, Maybe> heads(Tensor x, Tensor cos, Tensor sin, std::vector<Tensor> weights, int64_t heads, int64_t kv_heads, double eps, bool offset) {
    const int64_t T = x.size(0), D = cos.size(cos.dim() - 1);
    const Tensor q = empty(x, {T, heads, D}), k = empty(x, {T, kv_heads, D});
    const Maybe scales = weights.empty() ? std::nullopt : Maybe(empty(x, {T, heads + kv_heads}, ScalarType::Float));
    with_heads(x, cos, sin, weights, heads, kv_heads, eps, offset, [&](const auto& a) {
        using X = typename std::decay_t<decltype(a)>::Number;
        turn_heads(a, numbers<X>(q), numbers<X>(k), numbers<float>(scales), threads());
    });
    return {q, k, scales};
}

// weighs: whether the norms' weights have gradients [2, D], of float32.
static Two heads_backward(std::vector<Tensor> grads, Maybe x, Tensor cos, Tensor sin, std::vector<Tensor> weights, Maybe scales, int64_t heads, int64_t kv_heads, double eps, bool offset, bool weighs) {
    const int64_t D = cos.size(cos.dim() - 1);
    const Tensor grad_x = empty(cos, {cos.size(0), (heads + 2 * kv_heads) * D});
    const Maybe grad_weights = weighs ? Maybe(empty(cos, {2, D}, ScalarType::Float)) : std::nullopt;
    for (Tensor& grad : grads) grad = heads_in_rows(grad);
    with_heads(x, cos, sin, weights, heads, kv_heads, eps, offset, [&](const auto& a) {
        using X = typename std::decay_t<decltype(a)>::Number;
        const X* places[3];
        int64_t steps[3];
        for (int i = 0; i < 3; i++) places[i] = numbers<X>(grads[i]), steps[i] = grads[i].stride(0);
        turn_heads_backward(a, places, steps, numbers<float>(scales), numbers<X>(grad_x), numbers<float>(grad_weights), threads());
    });
    return {grad_x, grad_weights};
}

static Tensor gate(Tensor x) {
    x = in_rows(x);
    const Tensor y = empty(x, {x.size(0), x.size(1) / 2});
    by_type(narrow(x), [&](auto number) {
        using X = decltype(number);
        gate_rows(x.size(0), x.size(1) / 2, numbers<X>(x), x.stride(0), numbers<X>(y), threads());
    });
    return y;
}

static Tensor gate_backward(Tensor x, Tensor grad) {
    x = in_rows(x), grad = in_rows(grad);
    const Tensor grad_x = empty(x, {x.size(0), x.size(1)});
    by_type(narrow(x), [&](auto number) {
        using X = decltype(number);
        gate_rows_backward(grad.size(0), grad.size(1), numbers<X>(x), x.stride(0), numbers<X>(grad), grad.stride(0), numbers<X>(grad_x), threads());
    });
    return grad_x;
}

static Two logit_sums(Tensor z, bool entropy) {
    const Tensor totals = empty(z, {z.size(0)});
    const Maybe entropies = entropy ? Maybe(empty(z, {z.size(0)})) : std::nullopt;
    const int64_t rows = z.size(0), v = z.size(1);
    const float* all = numbers<float>(z);
    float *total = numbers<float>(totals), *of_row = numbers<float>(entropies);
#pragma omp parallel for num_threads(threads()) if (rows * v > ALONE)
    for (int64_t row = 0; row < rows; row++) sum_logits(all + row * v, v, total + row, of_row ? of_row + row : nullptr);
    return {totals, entropies};
}

static void logit_gradients(Tensor z, Tensor total, Tensor constant, Maybe slope, Tensor at_token, Tensor token) {
    total = whole(total), constant = whole(constant), at_token = whole(at_token), token = whole(token);
    if (slope) slope = whole(*slope);
    const LogitSlopes of{numbers<float>(constant), numbers<float>(slope), numbers<float>(at_token), numbers<int64_t>(token)};
    const int64_t rows = z.size(0), v = z.size(1);
    float *all = numbers<float>(z), *totals = numbers<float>(total);
#pragma omp parallel for num_threads(threads()) if (rows * v > ALONE)
    for (int64_t row = 0; row < rows; row++) logits_gradient(all + row * v, v, totals[row], of, row);
}

static bool multiplies_narrow() {  // whether this CPU has the operations on products below
#if defined(__AMX_BF16__)
    return has_tiles();
#elif defined(__AVX512BF16__)
    return true;
#endif
    return false;
}

static bool multiplies_many() {  // whether products of float32 are faster here than PyTorch's
#if defined(__AVX512F__)
    return __builtin_cpu_is("amd");  // where MKL's have half as wide vectors
#elif defined(__AVX2__)
    return true;
#endif
    return false;
}

static int64_t panel() { return PANEL; }  // what a head size of `attend_forest` is a multiple of

STABLE_TORCH_LIBRARY_FRAGMENT(tunesmith, m) {
    m.def("multiplies_narrow() -> bool");
    m.def("multiplies_many() -> bool");
    m.def("multiply_rows(Tensor x, Tensor weight, bool turned) -> Tensor");
    m.def("multiply_pairs(Tensor x, Tensor weight, bool turned) -> Tensor");
    m.def("weight_gradients(Tensor grad, Tensor x, Tensor(a!)[] sums, int[] adds) -> ()");
    m.def("panel() -> int");
    m.def("attend_forest(Tensor table, Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)");
    m.def("attend_forest_backward(Tensor table, Tensor q, Tensor k, Tensor v, Tensor out, Tensor grad, Tensor lse, float scale) -> (Tensor, Tensor, Tensor)");
    m.def("logit_sums(Tensor z, bool entropy) -> (Tensor, Tensor?)");
    m.def("logit_gradients(Tensor(a!) z, Tensor total, Tensor constant, Tensor? slope, Tensor at_token, Tensor token) -> ()");
    m.def("attention_backward(Tensor table, Tensor q, Tensor k, Tensor v, Tensor out, Tensor grad, Tensor lse, float scale) -> (Tensor, Tensor, Tensor)");
    m.def("norm(Tensor x, Tensor weight, float eps, bool offset) -> (Tensor, Tensor)");
    m.def("norm_backward(Tensor x, Tensor grad, Tensor weight, Tensor scales, float eps, bool offset, bool weighs) -> (Tensor, Tensor?)");
    m.def("heads(Tensor x, Tensor cos, Tensor sin, Tensor[] weights, int heads, int kv_heads, float eps, bool offset) -> (Tensor, Tensor, Tensor?)");
    m.def("heads_backward(Tensor[] grads, Tensor? x, Tensor cos, Tensor sin, Tensor[] weights, Tensor? scales, int heads, int kv_heads, float eps, bool offset, bool weighs) -> (Tensor, Tensor?)");
    m.def("gate(Tensor x) -> Tensor");
    m.def("gate_backward(Tensor x, Tensor grad) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(tunesmith, CompositeExplicitAutograd, m) {
    m.impl("multiplies_narrow", TORCH_BOX(&multiplies_narrow));
    m.impl("multiplies_many", TORCH_BOX(&multiplies_many));
    m.impl("panel", TORCH_BOX(&panel));
}
STABLE_TORCH_LIBRARY_IMPL(tunesmith, CPU, m) {
    m.impl("multiply_rows", TORCH_BOX(&multiplied_rows));
    m.impl("weight_gradients", TORCH_BOX(&weight_gradients));
#ifdef __AVX512BF16__
    m.impl("multiply_pairs", TORCH_BOX(&multiplied_pairs));
    m.impl("attention_backward", TORCH_BOX(&attention_backward));
#endif
    m.impl("attend_forest", TORCH_BOX(&attend_forest));
    m.impl("attend_forest_backward", TORCH_BOX(&attend_forest_backward));
    m.impl("logit_sums", TORCH_BOX(&logit_sums));
    m.impl("logit_gradients", TORCH_BOX(&logit_gradients));
    m.impl("norm", TORCH_BOX(&norm));
    m.impl("norm_backward", TORCH_BOX(&norm_backward));
    m.impl("heads", TORCH_BOX(&heads));
    m.impl("heads_backward", TORCH_BOX(&heads_backward));
    m.impl("gate", TORCH_BOX(&gate));
    m.impl("gate_backward", TORCH_BOX(&gate_backward));
}
