// The router of a mixture of experts: chooses the experts of each row, and computes their weights.
//
// A row's scores are the softmax or the sigmoids of its logits. The experts with the largest scores are chosen, of
// equal ones those with the lowest numbers; a bias may be added for the choice only, to scores or to logits. If experts are in groups, the
// groups whose best experts score most are chosen first, and then experts of these groups. With a margin, each choice
// has a softmax of its own, over those that are left and close to the best. All in fp32, one thread per row.
#include <algorithm>
#include <cmath>
#include <memory>

#include "experts.h"
#include "threads.h"

namespace {

constexpr long SERIAL_ROWS = 64;  // rows below which a second thread costs more than it gains

// The number of the largest value that is not taken, the lowest of equal ones; always one, though all may be NaN
long best_of(const float* values, const bool* taken, long count) {
  long best = -1;
  for (long i = 0; i < count; i++)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

// scores [experts]; if only their ratios count, those of a softmax may have any sum
void score(const Routing& r, const float* logits, bool ratios, float* scores) {
  float most = r.sigmoid ? 0 : *std::max_element(logits, logits + r.experts), total = 0;
  for (long i = 0; i < r.experts; i += LANES) {
    Vec v = load(logits + i, r.experts - i);
    store(scores + i, r.sigmoid ? 1.f / (1.f + exp(-v)) : exp(v - most), r.experts - i);
  }
  if (r.sigmoid || ratios) return;
  for (long i = 0; i < r.experts; i++) total += scores[i];
  for (long i = 0; i < r.experts; i++) scores[i] /= total;
}

// Marks the experts of all groups but the best as taken.
void choose_groups(const Routing& r, const float* choice, bool* taken) {
  long size = r.experts / r.groups;
  std::unique_ptr<float[]> sums(new float[r.groups]);
  std::unique_ptr<bool[]> chosen(new bool[r.groups]());
  for (long g = 0; g < r.groups; g++) {
    std::unique_ptr<bool[]> counted(new bool[size]());
    sums[g] = 0;
    for (long i = 0; i < r.group_best; i++) {
      long best = best_of(choice + g * size, counted.get(), size);
      counted[best] = true;
      sums[g] += choice[g * size + best];
    }
  }
  for (long i = 0; i < r.chosen_groups; i++) chosen[best_of(sums.get(), chosen.get(), r.groups)] = true;
  for (long i = 0; i < r.experts; i++) taken[i] = !chosen[i / size];
}

// The choice of a sparse mixer; see Routing in native/layer_shape.py.
void choose_with_margin(const Routing& r, const float* logits, int64_t* ids, float* weights, bool* taken) {
  std::fill(taken, taken + r.experts, false);
  for (long i = 0; i < r.experts_per_token; i++) {
    long best = best_of(logits, taken, r.experts);
    float most = logits[best], total = 0;
    for (long j = 0; j < r.experts; j++)
      if (!taken[j] && !(most - logits[j] > r.margin * std::max(std::abs(logits[j]), most)))
        total += exp(broadcast(logits[j] - most))[0];
    taken[best] = true;
    ids[i] = best;
    weights[i] = r.scale / total;
  }
}

void route_row(const Routing& r, const float* logits, const float* bias, int64_t* ids, float* weights, float* scores,
               float* choice, bool* taken) {
  if (r.margin >= 0) return choose_with_margin(r, logits, ids, weights, taken);
  score(r, logits, r.normalized && !bias, scores);
  const float* basis = r.chooses_by_logits ? logits : scores;
  for (long i = 0; i < r.experts; i++) choice[i] = bias ? basis[i] + bias[i] : basis[i];
  std::fill(taken, taken + r.experts, false);
  if (r.groups > 1) choose_groups(r, choice, taken);
  float total = 0;
  for (long i = 0; i < r.experts_per_token; i++) {
    ids[i] = best_of(choice, taken, r.experts);
    taken[ids[i]] = true;
    weights[i] = scores[ids[i]];
    total += weights[i];
  }
  for (long i = 0; i < r.experts_per_token; i++)
    weights[i] = (r.normalized ? weights[i] / (total + 1e-20f) : weights[i]) * r.scale;
}

}  // namespace

extern "C" {

// ids [M, chosen] and weights [M, chosen] of the experts for rows of logits [M, experts]; bias [experts] may be null.
// Rows of logits and weights have one number more if there is a shared expert: the logit of its weight, if `shared` is
// 2, and its weight.
void route(const float* logits, const float* bias, int64_t* ids, float* weights, const Routing* routing, int64_t M,
           int64_t threads) {
  const Routing& r = *routing;
  long width = r.experts + (r.shared == 2), count = r.experts_per_token + !!r.shared;
  run_parallel(M < SERIAL_ROWS ? 1 : threads, [=] {
    std::unique_ptr<float[]> numbers(new float[2 * r.experts]);
    std::unique_ptr<bool[]> taken(new bool[r.experts]);
#pragma omp for
    for (long m = 0; m < M; m++) {
      const float* row = logits + m * width;
      route_row(r, row, bias, ids + m * r.experts_per_token, weights + m * count, numbers.get(),
                numbers.get() + r.experts, taken.get());
      if (r.shared)
        weights[m * count + r.experts_per_token] =
            r.shared == 2 ? (1.f / (1.f + exp(broadcast(-row[r.experts]))))[0] : 1.f;
    }
  });
}

}  // extern "C"
