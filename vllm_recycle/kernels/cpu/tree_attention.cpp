// Tree attention that reads the cache where it is; the twin of the torch function of that name. On
// x86 a row has the bits of vLLM's own decode row for its path (`calls.tree_attention`).
//
// Plain C interface, tensors as pointers; all integers are int64 unless said otherwise. Compiled on
// the machine that runs it (build.py).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "amx.h"
#include "tree_columns.h"

namespace {

// Queries that share each load of a key or value: as many as keep their sums in registers.
#ifdef __AVX512F__
constexpr int64_t TILE = 8;
#else
constexpr int64_t TILE = 6;
#endif
// The most queries of a job, whole tiles of either size, and the columns that a thread scores at once.
constexpr int64_t MOST_QUERIES = 48, COLUMNS_AT_ONCE = 4 * LANES;
// Scores of the jobs that are computed together, for each thread; one job alone may have more.
constexpr size_t MOST_SCORES = 1 << 17;

// Some queries of a KV head of a request, from `begin` to `end`.
template <typename T>
struct Job {
  int64_t request, kv_head, begin, end;
  Columns<T> columns;
  // [queries, columns], and of each query one divided by what its weights add up to.
  float *scores = nullptr, *inverse = nullptr;

  Job(const Attention& a, const Cache<T>& own, int64_t request, int64_t kv_head, int64_t begin,
      int64_t end)
      : request(request), kv_head(kv_head), begin(begin), end(end),
        columns(a, cache_of<T>(a, request, kv_head), own, request, end) {}

  int64_t count() const { return end - begin; }
  Query<T> query(const Attention& a, int64_t i) const { return {a, request, kv_head, begin + i}; }
};

// All jobs of a step, of which none has more than some queries.
template <typename T>
struct Jobs {
  std::vector<std::vector<T>> own;  // of each KV head of each request, if given
  std::vector<Job<T>> jobs;

  Jobs(const Attention& a, int64_t most_queries, int64_t threads) {
    const int64_t heads = a.trees.batch * a.kv_heads;
    std::vector<Cache<T>> caches(heads);
    if (a.own_keys.base) {
      own.resize(heads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
      for (int64_t i = 0; i < heads; i++) {
        caches[i] = pack_own(a, i / a.kv_heads, i % a.kv_heads, own[i]);
      }
    }
    for (int64_t head = 0; head < heads; head++) {
      const int64_t request = head / a.kv_heads;
      const int64_t queries = a.trees.num_rows[request] * (a.heads / a.kv_heads);
      const int64_t parts = (queries + most_queries - 1) / most_queries;  // of nearly one size
      for (int64_t i = 0; i < parts; i++) {
        jobs.emplace_back(a, caches[head], request, head % a.kv_heads, i * queries / parts,
                          (i + 1) * queries / parts);
      }
    }
  }
};

// Calls `use` with a number from 1 to TILE as a constant.
template <int64_t N = TILE, typename Use>
inline void with_size(int64_t size, const Use& use) {
  if constexpr (N > 1) {
    if (size < N) return with_size<N - 1>(size, use);
  }
  use(std::integral_constant<int64_t, N>{});
}
// Calls `use` for each tile of some queries, with its size, as a constant, and its first one.
template <typename Use>
inline void in_tiles(int64_t count, const Use& use) {
  const int64_t tiles = (count + TILE - 1) / TILE;  // of nearly one size
  for (int64_t tile = 0; tile < tiles; tile++) {
    const int64_t start = tile * count / tiles;
    with_size((tile + 1) * count / tiles - start, [&](auto size) { use(size, start); });
  }
}

// sums[i][0..15] += side[0..15] * factors[i * stride]
template <int64_t N, typename T>
inline void add_products(Vec (&sums)[N][PARTS], const T* side, const float* factors,
                         int64_t stride) {
  Vec lanes[PARTS];
  for (int64_t p = 0; p < PARTS; p++) lanes[p] = in_register(load(side + p * WIDTH));
  for (int64_t i = 0; i < N; i++) {
    const Vec factor = splat(factors[i * stride]);
    for (int64_t p = 0; p < PARTS; p++) sums[i][p] = add_product(sums[i][p], lanes[p], factor);
  }
}

// The scores of a job's queries in COLUMNS_AT_ONCE columns: scaled queries . keys
template <typename T>
void score(const Attention& a, const Job<T>& job, int64_t from, std::vector<float>& queries) {
  const int64_t dim = a.dim, stride = job.columns.padded;
  const int64_t to = std::min(stride, from + COLUMNS_AT_ONCE);
  queries.resize(job.count() * dim);  // converted and scaled once, not at each key
  for (int64_t i = 0; i < job.count(); i++) {
    const T* in = job.query(a, i).in;
    for (int64_t d = 0; d < dim; d++) queries[i * dim + d] = to_float(in[d]) * a.scale;
  }
  for (int64_t column = from; column < to; column += LANES) {
    const auto [cache, tokens, first_column] = job.columns.segment_of(column);
    const int64_t token = column - first_column, block_size = cache.block_size;
    const T* keys = cache.keys(token) + token % block_size;
    in_tiles(job.count(), [&](auto size, int64_t begin) {
      constexpr int64_t N = decltype(size)::value;
      Vec sums[N][PARTS] = {};
      const float* factors = queries.data() + begin * dim;
      for (int64_t d = 0; d < dim; d++) {
        __builtin_prefetch(keys + d * block_size + LANES);  // of the next columns
        add_products<N>(sums, keys + d * block_size, factors + d, dim);
      }
      for (int64_t i = 0; i < N; i++) {
        std::memcpy(job.scores + (begin + i) * stride + column, sums[i], LANES * 4);
      }
    });
  }
}

// Dimensions d .. d + 15 of the output of a job's queries: weights . values
template <typename T>
void weigh(const Attention& a, const Job<T>& job, int64_t d, std::vector<float>& sums) {
  const int64_t dim = a.dim, stride = job.columns.padded;
  sums.assign(job.count() * LANES, 0.0f);
  for (const auto& [cache, tokens, column] : job.columns.segments) {
    for (int64_t token = 0; token < tokens; token += cache.block_size) {
      const T* values = cache.values(token) + d;
      const float* weights = job.scores + column + token;
      const int64_t count = std::min(tokens - token, cache.block_size);
      in_tiles(job.count(), [&](auto size, int64_t begin) {
        constexpr int64_t N = decltype(size)::value;
        Vec of_tile[N][PARTS];
        float* totals = sums.data() + begin * LANES;
        std::memcpy(of_tile, totals, sizeof(of_tile));
        const float* factors = weights + begin * stride;
        for (int64_t i = 0; i < count; i++) {
          add_products<N>(of_tile, values + i * dim, factors + i, stride);
        }
        std::memcpy(totals, of_tile, sizeof(of_tile));
      });
    }
  }
  for (int64_t i = 0; i < job.count(); i++) {
    T* out = job.query(a, i).out + d;
    for (int64_t p = 0; p < PARTS; p++) {
      store(out + p * WIDTH, load(sums.data() + i * LANES + p * WIDTH) * job.inverse[i]);
    }
  }
}

#ifdef HAS_AMX
// What a thread computes in; vectors keep their memory from one job to the next.
struct Scratch {
  std::vector<float> scores;
  std::vector<bf16> halves;
};

// Attends from at most 32 queries of the AMX layout, more than 16 of them if TWO.
template <bool TWO>
void attend_amx(const Attention& a, const Job<bf16>& job, Scratch& scratch) {
  constexpr int64_t N = TWO ? AMX_QUERIES : TILE_ROWS;
  const Columns<bf16>& columns = job.columns;
  const int64_t count = job.count(), stride = columns.padded + TILE_DEPTH;
  scratch.scores.resize(N * stride);
  scratch.halves.assign(N * std::max(a.dim, stride), bf16{});
  float* scores = scratch.scores.data();
  bf16* halves = scratch.halves.data();  // the queries, and later the weights
  for (int64_t i = 0; i < count; i++) {
    std::copy_n(job.query(a, i).in, a.dim, halves + i * a.dim);
  }
  for (const Segment<bf16>& part : columns.segments) {
    const auto& [at, tokens, column] = part;
    for (int64_t token = 0; token < tokens; token += LANES) {
      const bf16* keys = at.keys(token) + token % at.block_size * a.dim;
      score_tile<TWO>(halves, a.dim, keys, scores + column + token, stride);
    }
  }
  float inverse[N];
  for (int64_t i = 0; i < count; i++) {
    const Query<bf16> query = job.query(a, i);
    for (int64_t c = 0; c < columns.padded; c++) scores[i * stride + c] *= a.scale;
    inverse[i] = columns.softmax(scores + i * stride, query);
    store_halves(halves + i * stride, scores + i * stride, columns.padded);
  }
  for (int64_t d = 0; d < a.dim; d += LANES) {
    _tile_zero(0);
    if (TWO) _tile_zero(1);
    for (const Segment<bf16>& part : columns.segments) {
      const auto& [at, tokens, column] = part;
      for (int64_t token = 0; token < tokens; token += TILE_DEPTH) {
        const bf16* values =
            at.values(token) + d * at.block_size + token % at.block_size * LANES;
        const int64_t rest = std::min(TILE_DEPTH, tokens - token);
        weigh_tile<TWO>(halves + column + token, stride, values, rest);
      }
    }
    _tile_stored(0, scores, LANES * 4);  // nobody needs the scores any more
    if (TWO) _tile_stored(1, scores + TILE_ROWS * LANES, LANES * 4);
    for (int64_t i = 0; i < count; i++) {
      bf16* out = job.query(a, i).out;
      Vec values = load(scores + i * LANES) * inverse[i];
      store_halves(out + d, reinterpret_cast<float*>(&values), LANES);
    }
  }
}

void attend_by_amx(const Attention& a, int64_t threads) {
  const Jobs<bf16> all(a, AMX_QUERIES, threads);
  const std::vector<Job<bf16>>& jobs = all.jobs;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch scratch;
    const Tiles tiles;
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < jobs.size(); i++) {
      auto attend = jobs[i].count() > TILE_ROWS ? attend_amx<true> : attend_amx<false>;
      attend(a, jobs[i], scratch);
    }
  }
}
#endif

// All threads score, exponentiate and weigh together, so that a few heads are enough for many.
template <typename T>
void attend(const Attention& a, int64_t threads) {
  // What a thread takes at a time: a job, and its first column, a query, or its first dimension.
  typedef std::vector<std::pair<const Job<T>*, int64_t>> Pieces;
  static thread_local std::vector<float> all_scores;
  Jobs<T> all(a, MOST_QUERIES, threads);
  std::vector<Job<T>>& jobs = all.jobs;
  for (size_t start = 0, end; start < jobs.size(); start = end) {
    Pieces columns, queries, dims;
    size_t num_scores = 0;
    for (end = start; end < jobs.size(); end++) {
      const Job<T>& job = jobs[end];
      const size_t size = job.count() * (job.columns.padded + 1);
      if (end > start && num_scores + size > MOST_SCORES * threads) break;
      num_scores += size;
      for (int64_t c = 0; c < job.columns.padded; c += COLUMNS_AT_ONCE) columns.push_back({&job, c});
      for (int64_t i = 0; i < job.count(); i++) queries.push_back({&job, i});
      for (int64_t d = 0; d < a.dim; d += LANES) dims.push_back({&job, d});
    }
    if (all_scores.size() < num_scores) all_scores.resize(num_scores);
    float* scores = all_scores.data();
    for (size_t i = start; i < end; i++) {
      jobs[i].scores = scores, jobs[i].inverse = scores + jobs[i].count() * jobs[i].columns.padded;
      scores = jobs[i].inverse + jobs[i].count();
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      std::vector<float> scratch;
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < columns.size(); i++) {
        score(a, *columns[i].first, columns[i].second, scratch);
      }
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < queries.size(); i++) {
        const Job<T>& job = *queries[i].first;
        const int64_t query = queries[i].second;
        float* scores = job.scores + query * job.columns.padded;
        job.inverse[query] = job.columns.softmax(scores, job.query(a, query));
      }
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < dims.size(); i++) {
        weigh(a, *dims[i].first, dims[i].second, scratch);
      }
    }
  }
}

}  // namespace

extern "C" {

// 1 where the AMX layout can be read on this machine.
int64_t reads_amx_layout() {
#ifdef HAS_AMX
  return may_use_amx();
#else
  return 0;
#endif
}

void tree_attention(const Queries* trees, void* query, int64_t query_stride, void* output,
                    int64_t output_stride, const void* kv_cache, void* own_keys,
                    int64_t own_key_stride, void* own_values, int64_t own_value_stride,
                    const float* sinks, int64_t heads, int64_t kv_heads, int64_t dim,
                    int64_t block_size, int64_t window, int64_t amx, int64_t is_bf16, float scale,
                    int64_t threads) {
  const Attention a = {*trees, {query, query_stride}, {output, output_stride}, kv_cache,
                       {own_keys, own_key_stride}, {own_values, own_value_stride}, sinks,
                       heads, kv_heads, dim, block_size, window, amx, scale};
#ifdef HAS_AMX
  if (amx) {
    attend_by_amx(a, threads);
    return;
  }
#endif
  if (is_bf16) attend<bf16>(a, threads);
  else attend<float>(a, threads);
}

}  // extern "C"
