// A mixture of experts: a router chooses a few of many MLPs for each row.
#pragma once
#include "weight.h"

// How a router turns logits into chosen experts and their weights. Fields as in Routing of native/layer_shape.py.
struct Routing {
  int64_t experts, experts_per_token, groups, chosen_groups, group_best;
  int64_t sigmoid, normalized, shared, weighs_inputs, chooses_by_logits;
  float scale, margin;
};

// MLPs. Each weight holds one per expert, one after another, without a permutation. `weighs_inputs`: the router's
// weights multiply the inputs of experts, not their outputs. Unless `gated`, gate_up has the outputs of up alone.
struct Experts {
  int64_t count;
  int64_t activation, gated, weighs_inputs;
  float gate_limit, up_limit;  // gates are at most gate_limit, ups within -up_limit .. up_limit; 0: there is none
  Linear gate_up, down;
};

// The router of a layer and its experts.
struct Mixture {
  Routing routing;
  const float* bias;  // of the router's choice, or null
  Linear router;
  Experts experts;
};

extern "C" {

void route(const float* logits, const float* bias, int64_t* ids, float* weights, const Routing* routing, int64_t M,
           int64_t threads);
int64_t experts_workspace(const Experts* experts, int64_t M, int64_t chosen);
void experts(const Experts* experts, const bf16* x, const int64_t* ids, const float* weights, const bf16* shared,
             bf16* out, int64_t M, int64_t chosen, void* memory, int64_t threads);

}  // extern "C"
