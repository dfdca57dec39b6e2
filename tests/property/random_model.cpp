#include "tests/property/random_model.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "tests/property/draw.h"

namespace tessera::testing {
namespace {

constexpr std::uint64_t kModelStream = 1;
constexpr std::uint64_t kConditionStream = 2;

class ModelDraw {
 public:
  explicit ModelDraw(std::uint64_t seed) : draw_(seed, kModelStream) {
    model_.seed = seed;
    model_.columns = draw_.between(1, 6);
    model_.head_columns = draw_.between(1, 3);
    model_.input_needs_gradient = draw_.chance(20);
    model_.is_chain = draw_.chance(25);
    shares_ = !model_.is_chain;
    has_dynamic_ = !model_.is_chain && draw_.chance(25);
  }

  ModelPlan make() {
    const int num_units = draw_.between(1, 5);
    for (int i = 0; i < num_units; ++i) {
      add_unit();
    }
    num_static_ = num_units;
    if (has_dynamic_) {
      add_dynamic_units();
    }
    add_head();
    if (model_.is_chain) {
      add_calls_in_a_row();
    } else {
      add_calls();
    }
    model_.autocast = draw_.chance(15);
    if (shares_) {
      draw_keepers();
    }
    draw_buffers();
    return std::move(model_);
  }

 private:
  UnitPlan& unit() { return model_.units.back(); }

  // A slot of the unit for a tensor of this shape: a parameter of its own, or one that exists.
  int add_slot(std::vector<std::int64_t> shape) {
    std::vector<int> same_shape;
    for (std::size_t i = 0; i < model_.params.size(); ++i) {
      if (model_.params[i].shape == shape) {
        same_shape.push_back(static_cast<int>(i));
      }
    }
    SlotPlan slot;
    if (!same_shape.empty() && shares_ && draw_.chance(35)) {
      slot.param = same_shape[draw_.below(same_shape.size())];
      const bool is_own =
          std::any_of(unit().slots.begin(), unit().slots.end(),
                      [&](const SlotPlan& each) { return each.param == slot.param; });
      slot.link = is_own || draw_.chance(50) ? Link::kRegistered : Link::kExternal;
    } else {
      ParamPlan param;
      param.name = unit().name + ".p" + std::to_string(unit().slots.size());
      param.transposed = shape.size() == 2 && draw_.chance(25);
      param.trainable = !is_frozen_ && !draw_.chance(10);
      param.shape = std::move(shape);
      slot.param = static_cast<int>(model_.params.size());
      model_.params.push_back(std::move(param));
    }
    unit().slots.push_back(slot);
    return static_cast<int>(unit().slots.size()) - 1;
  }

  std::vector<std::int64_t> vector_or_number() {
    switch (draw_.below(4)) {
      case 0:
        return {};
      case 1:
        return {1};
      default:
        return {width_};
    }
  }

  void add_linear(std::int64_t out) {
    OpPlan op{OpKind::kLinear, {add_slot({out, width_})}, -1};
    if (draw_.chance(50)) {
      op.slots.push_back(add_slot({out}));
    }
    unit().ops.push_back(std::move(op));
    width_ = out;
  }

  void add_op() {
    OpPlan op;
    op.kind = draw_.one_of({OpKind::kLinear, OpKind::kLinear, OpKind::kScale, OpKind::kShift,
                            OpKind::kLookup, OpKind::kNorm, OpKind::kEmptySum, OpKind::kTwice,
                            OpKind::kNarrow, OpKind::kActivation, OpKind::kInner, OpKind::kInner});
    switch (op.kind) {
      case OpKind::kLinear:
        add_linear(draw_.between(1, 9));
        return;
      case OpKind::kScale:
      case OpKind::kShift:
        op.slots = {add_slot(vector_or_number())};
        break;
      case OpKind::kLookup:
        op.slots = {add_slot({draw_.between(1, 5), width_})};
        break;
      case OpKind::kNorm:
        op.slots = {add_slot({width_}), add_slot({width_})};
        break;
      case OpKind::kEmptySum:
        op.slots = {draw_.chance(50) ? add_slot({0}) : add_slot({0, width_})};
        break;
      case OpKind::kTwice:
        op.slots = {add_slot({width_, width_})};
        break;
      case OpKind::kNarrow: {
        const std::int64_t out = draw_.between(1, 5);
        op.slots = {add_slot({out + 2, width_})};
        width_ = out;
        break;
      }
      case OpKind::kActivation:
      case OpKind::kRunning:  // drawn last
        break;
      case OpKind::kInner: {
        const auto num_before = static_cast<int>(model_.units.size()) - 1;
        if (num_before == 0 || width_ != model_.columns || !shares_) {
          return;
        }
        op.unit = draw_.between(0, num_before - 1);
        break;
      }
    }
    unit().ops.push_back(std::move(op));
  }

  void add_unit() {
    model_.units.emplace_back();
    unit().name = "u" + std::to_string(model_.units.size() - 1);
    if (shares_) {
      unit().signature = draw_.one_of({Signature::kTensor, Signature::kTuple, Signature::kVector,
                                       Signature::kMap, Signature::kStruct});
    }
    unit().recompute = draw_.chance(25);
    unit().init_by_rule = draw_.chance(25);
    unit().hands_input_back =
        unit().signature == Signature::kVector && !has_dynamic_ && draw_.chance(20);
    is_frozen_ = draw_.chance(15);
    width_ = model_.columns;
    const int num_ops = draw_.between(0, 3);
    for (int i = 0; i < num_ops; ++i) {
      add_op();
    }
    if (width_ != model_.columns) {
      add_linear(model_.columns);
    }
    // A unit that returns its argument makes one tensor the result of two: in backward both begin
    // at once, in an order that dynamic units before them would change.
    if ((model_.is_chain || has_dynamic_) && unit().ops.empty()) {
      unit().ops.push_back({OpKind::kActivation, {}, -1});
    }
    if (!model_.is_chain && draw_.chance(15)) {
      add_slot({draw_.between(1, 7)});  // never used
    }
  }

  void add_dynamic_units() {
    model_.input_needs_gradient = true;
    shares_ = false;
    const int num_dynamic = draw_.between(1, 3);
    for (int i = 0; i < num_dynamic; ++i) {
      add_unit();
      unit().dynamic = true;
    }
  }

  // One trainable weight that every loss has a part in: without it there might be no gradient.
  void add_head() {
    model_.units.emplace_back();
    unit().name = "head";
    unit().recompute = draw_.chance(25);
    unit().slots.push_back({static_cast<int>(model_.params.size()), Link::kOwn});
    model_.params.push_back(
        {"head.p0", {model_.head_columns, model_.columns}, draw_.chance(25), true});
    unit().ops.push_back({OpKind::kLinear, {0}, -1});
  }

  // A unit that others run inside of their own forward keeps nothing: recomputed, they would drop
  // the graph that it needs, which is an error.
  void draw_keepers() {
    for (std::size_t i = 0; i < model_.units.size(); ++i) {
      const bool is_inner =
          std::any_of(model_.units.begin(), model_.units.end(), [&](const UnitPlan& each) {
            return std::any_of(each.ops.begin(), each.ops.end(),
                               [&](const OpPlan& op) { return op.unit == static_cast<int>(i); });
          });
      model_.units[i].keeps = !is_inner && draw_.chance(20);
    }
  }

  void draw_buffers() {
    for (UnitPlan& each : model_.units) {
      if (draw_.chance(20)) {
        const auto place = static_cast<std::ptrdiff_t>(draw_.below(each.ops.size() + 1));
        each.ops.insert(each.ops.begin() + place, {OpKind::kRunning, {}, -1});
      }
    }
  }

  void add_condition(CallPlan& call) {
    if (draw_.chance(model_.is_chain ? 20 : 40)) {
      call.when = draw_.one_of({When::kEvenSteps, When::kRandomly});
      call.otherwise =
          !model_.is_chain && draw_.chance(50) ? draw_.between(0, num_static_ - 1) : -1;
    }
  }

  void add_calls_in_a_row() {
    for (int i = 0; i < num_static_; ++i) {
      CallPlan call;
      call.unit = i;
      call.arguments = {i};
      add_condition(call);
      model_.calls.push_back(std::move(call));
    }
    model_.head_argument = num_static_;
  }

  void add_calls() {
    int num_values = 1;
    const int num_calls = draw_.between(1, 6);
    auto next_dynamic = static_cast<std::size_t>(num_static_);
    const auto recent = [&] {
      return draw_.chance(70) ? num_values - 1 : draw_.between(0, num_values - 1);
    };
    for (int i = 0; i < num_calls; ++i) {
      CallPlan call;
      call.unit = draw_.between(0, num_static_ - 1);
      const UnitPlan& called = model_.units[static_cast<std::size_t>(call.unit)];
      const int most = std::min(3, static_cast<int>(called.most_arguments()));
      const int num_arguments = draw_.between(1, most);
      for (int a = 0; a < num_arguments; ++a) {
        call.arguments.push_back(recent());
      }
      add_condition(call);
      num_values += called.num_results();
      model_.calls.push_back(std::move(call));
      if (model_.units[next_dynamic].dynamic && draw_.chance(60)) {
        model_.calls.push_back(
            {static_cast<int>(next_dynamic), {recent()}, When::kOnSomeRanks, -1});
        num_values += model_.units[next_dynamic].num_results();
        ++next_dynamic;
      }
    }
    model_.head_argument = recent();
    const int num_losses = draw_.chance(40) ? draw_.between(1, 2) : 0;
    for (int i = 0; i < num_losses; ++i) {
      model_.losses.push_back({draw_.between(0, num_values - 1), draw_.between(0, 2)});
    }
    const auto num_params = static_cast<int>(model_.params.size());
    while (draw_.chance(15)) {
      model_.weight_losses.push_back({draw_.between(0, num_params - 1), draw_.chance(25)});
    }
  }

  Draw draw_;
  ModelPlan model_;
  std::int64_t width_ = 1;  // of what the unit that is drawn has so far
  bool is_frozen_ = false;
  bool has_dynamic_ = false;
  bool shares_ = true;  // parameters and inner units
  int num_static_ = 0;  // units before the dynamic ones
};

const char* name_of(OpKind kind) {
  constexpr const char* kNames[] = {"linear", "scale",  "shift",      "lookup", "norm",   "empty",
                                    "twice",  "narrow", "activation", "inner",  "running"};
  return kNames[static_cast<std::size_t>(kind)];
}

const char* name_of(Signature signature) {
  constexpr const char* kNames[] = {"tensor", "tuple", "vector", "map", "struct"};
  return kNames[static_cast<std::size_t>(signature)];
}

void describe_param(std::ostream& out, const ModelPlan& model, const SlotPlan& slot) {
  const ParamPlan& param = model.params[static_cast<std::size_t>(slot.param)];
  out << param.name << '[';
  for (std::size_t i = 0; i < param.shape.size(); ++i) {
    out << (i > 0 ? "x" : "") << param.shape[i];
  }
  out << ']' << (param.transposed ? " transposed" : "") << (param.trainable ? "" : " frozen");
  if (slot.link != Link::kOwn) {
    out << (slot.link == Link::kRegistered ? " registered again" : " external");
  }
}

void describe_unit(std::ostream& out, const ModelPlan& model, const UnitPlan& unit) {
  out << "  unit " << unit.name << " (" << name_of(unit.signature)
      << (unit.dynamic ? ", dynamic" : "") << (unit.recompute ? ", recomputed" : "")
      << (unit.init_by_rule ? ", init by rule" : "")
      << (unit.hands_input_back ? ", hands its input back" : "")
      << (unit.keeps ? ", keeps a tensor" : "") << "):";
  for (const OpPlan& op : unit.ops) {
    out << ' ' << name_of(op.kind);
    for (const int slot : op.slots) {
      out << " #" << slot;
    }
    if (op.unit >= 0) {
      out << ' ' << model.units[static_cast<std::size_t>(op.unit)].name;
    }
    out << ';';
  }
  out << '\n';
  for (std::size_t i = 0; i < unit.slots.size(); ++i) {
    out << "    #" << i << ' ';
    describe_param(out, model, unit.slots[i]);
    out << '\n';
  }
}

}  // namespace

int UnitPlan::num_results() const {
  switch (signature) {
    case Signature::kTensor:
    case Signature::kStruct:
      return 1;
    case Signature::kTuple:
    case Signature::kMap:
      return 2;
    case Signature::kVector:
      return hands_input_back ? 3 : 2;
  }
  return 1;
}

std::size_t UnitPlan::most_arguments() const {
  return signature == Signature::kTensor ? 1 : signature == Signature::kTuple ? 2 : 1000;
}

bool ModelPlan::has_recompute() const {
  return std::any_of(weight_losses.begin(), weight_losses.end(),
                     [](const WeightLossPlan& loss) { return loss.recompute; }) ||
         std::any_of(units.begin(), units.end(),
                     [](const UnitPlan& unit) { return unit.recompute; });
}

bool ModelPlan::has_dynamic() const {
  return std::any_of(units.begin(), units.end(), [](const UnitPlan& unit) { return unit.dynamic; });
}

bool ModelPlan::has_buffers() const {
  return std::any_of(units.begin(), units.end(), [](const UnitPlan& unit) {
    return std::any_of(unit.ops.begin(), unit.ops.end(),
                       [](const OpPlan& op) { return op.kind == OpKind::kRunning; });
  });
}

bool happens(const ModelPlan& model, std::size_t call, const Moment& moment) {
  switch (model.calls[call].when) {
    case When::kAlways:
      return true;
    case When::kEvenSteps:
      return moment.step % 2 == 0;
    case When::kRandomly:
    case When::kOnSomeRanks: {
      const int rank = model.calls[call].when == When::kOnSomeRanks ? moment.rank + 1 : 0;
      const auto number = static_cast<std::uint64_t>(
          ((moment.step * 8 + moment.micro_batch + 1) * 8 + moment.forward) * 8 + rank);
      return Draw(model.seed * 64 + call, kConditionStream + number).chance(50);
    }
  }
  return true;
}

std::string ModelPlan::describe() const {
  std::ostringstream out;
  out << "model of " << columns << " columns"
      << (input_needs_gradient ? ", input needs gradient" : "") << (is_chain ? ", a chain" : "")
      << (autocast ? ", autocast" : "") << '\n';
  for (const UnitPlan& unit : units) {
    describe_unit(out, *this, unit);
  }
  int value = 1;
  for (const CallPlan& call : calls) {
    const UnitPlan& unit = units[static_cast<std::size_t>(call.unit)];
    out << "  value " << value << ".. = " << unit.name << '(';
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
      out << (i > 0 ? ", " : "") << call.arguments[i];
    }
    out << ')';
    if (call.when != When::kAlways) {
      out << (call.when == When::kEvenSteps     ? " in even steps"
              : call.when == When::kOnSomeRanks ? " on some ranks"
                                                : " at random")
          << ", else "
          << (call.otherwise < 0 ? "its argument"
                                 : units[static_cast<std::size_t>(call.otherwise)].name);
    }
    out << '\n';
    value += unit.num_results();
  }
  out << "  head(" << head_argument << ')';
  for (const LossPlan& loss : losses) {
    out << ", loss of value " << loss.value << " form " << loss.form;
  }
  for (const WeightLossPlan& loss : weight_losses) {
    out << ", loss of weight " << params[static_cast<std::size_t>(loss.param)].name
        << (loss.recompute ? " recomputed" : "");
  }
  out << '\n';
  return out.str();
}

ModelPlan draw_model(std::uint64_t seed) { return ModelDraw(seed).make(); }

}  // namespace tessera::testing
