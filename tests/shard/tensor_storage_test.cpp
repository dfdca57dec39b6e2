// Tensors whose memory comes and goes under autograd's feet.
//
// Each operator runs forward on one piece of memory, is released, gathered to another one while the
// first holds NaN, and runs backward: the gradients must be those of an ordinary tensor, to the
// bit.
#include "tessera/shard/tensor_storage.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "tessera/core/error.h"

namespace tessera::shard {
namespace {

constexpr int kNumRanks = 3;  // 3 divides hardly any of the sizes below: there is padding

// A bound tensor, and the memory of two gathers in turn. What is released is overwritten.
class BoundTensor {
 public:
  BoundTensor(const std::string& name, const at::Tensor& values, int num_ranks = kNumRanks)
      : layout_(values.numel(), num_ranks, dtype_of(values, name)),
        elements_(storage_elements(values).clone()),
        tensor_(values.detach().as_strided(values.sizes(), values.strides())),
        full_(bind_tensor(tensor_, name, layout_)) {
    const std::int64_t padded = layout_.padded_numel();
    memory_ = {at::full({padded}, kNaN, values.options()),
               at::full({padded}, kNaN, values.options())};
    tensor_.set_requires_grad(true);
  }

  void gather() {
    current_ = 1 - current_;
    memory_[current_].zero_();
    memory_[current_].narrow(0, 0, elements_.numel()).copy_(elements_);
    full_->attach(memory_[current_].data_ptr());
  }
  void release() {
    full_->detach();
    memory_[current_].fill_(kNaN);
  }
  void destroy() { full_.reset(); }

  at::Tensor& tensor() { return tensor_; }
  const Layout& layout() const { return layout_; }
  const at::Tensor& memory() const { return memory_[current_]; }
  FullTensor& full() { return *full_; }

 private:
  static constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  Layout layout_;
  at::Tensor elements_;
  at::Tensor tensor_;
  std::unique_ptr<FullTensor> full_;
  std::vector<at::Tensor> memory_;
  std::size_t current_ = 0;
};

using Model = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// Bound and ordinary tensors with the same values through the same model.
void expect_equal_gradients(const std::vector<at::Tensor>& values, const Model& model) {
  std::vector<std::unique_ptr<BoundTensor>> bound;
  std::vector<at::Tensor> tensors;
  std::vector<at::Tensor> plain;
  for (const at::Tensor& value : values) {
    plain.push_back(value.clone().set_requires_grad(true));
    bound.push_back(std::make_unique<BoundTensor>("w", value.clone()));
    tensors.push_back(bound.back()->tensor());
    bound.back()->gather();
  }
  at::Tensor loss = model(tensors).to(at::kFloat).pow(2).sum();
  for (const auto& each : bound) {
    each->release();
  }
  for (const auto& each : bound) {
    each->gather();
  }
  loss.backward();
  at::Tensor expected_loss = model(plain).to(at::kFloat).pow(2).sum();
  expected_loss.backward();
  EXPECT_TRUE(at::equal(loss, expected_loss));
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_TRUE(tensors[i].grad().defined());
    EXPECT_EQ(tensors[i].grad().sizes(), values[i].sizes());
    EXPECT_TRUE(at::equal(tensors[i].grad(), plain[i].grad())) << "parameter " << i;
  }
}

class TensorStorage : public testing::Test {
 protected:
  void SetUp() override { at::manual_seed(7); }
};

TEST_F(TensorStorage, BackwardIsThatOfAnOrdinaryTensor) {
  const at::Tensor x = at::randn({5, 7});
  const at::Tensor sequence = at::randn({2, 4, 7});
  const at::Tensor ids = at::randint(0, 11, {2, 4}, at::kLong);
  const at::Tensor image = at::randn({2, 3, 9, 9});
  const at::Tensor square = at::randn({7, 7});
  const at::Tensor vector = at::randn({7});
  const at::Tensor table = at::randn({11, 7});
  const std::vector<std::tuple<std::string, std::vector<at::Tensor>, Model>> cases = {
      {"linear", {square, vector}, [&](auto& p) { return at::linear(x, p[0], p[1]); }},
      {"linear of a sequence", {square}, [&](auto& p) { return at::linear(sequence, p[0]); }},
      {"two linears",
       {square, square},
       [&](auto& p) { return at::linear(at::relu(at::linear(x, p[0])), p[1]); }},
      {"embedding", {table}, [&](auto& p) { return at::embedding(p[0], ids); }},
      {"layer_norm",
       {vector, vector},
       [&](auto& p) { return at::layer_norm(sequence, {7}, p[0], p[1]); }},
      {"embedding tied to the head",
       {table},
       [&](auto& p) { return at::linear(at::embedding(p[0], ids), p[0]); }},
      {"a chain of views",
       {square},
       [&](auto& p) { return at::mm(x, p[0].view({49}).slice(0, 0, 42).view({6, 7}).t()); }},
      {"chunks of a weight",
       {square},
       [&](auto& p) {
         const auto parts = p[0].chunk(2, 0);
         return at::linear(x, parts[0]).sum() * at::linear(x, parts[1]);
       }},
      {"conv2d", {at::randn({4, 3, 3, 3})}, [&](auto& p) { return at::conv2d(image, p[0]); }},
      {"attention",
       {square},
       [&](auto& p) {
         const at::Tensor q = at::linear(sequence, p[0]);
         return at::scaled_dot_product_attention(q, q, q, {}, 0.0, true);
       }},
      {"a power", {square}, [&](auto& p) { return p[0].pow(3); }},
      {"a cast inside",
       {square},
       [&](auto& p) { return at::linear(x.to(at::kBFloat16), p[0].to(at::kBFloat16)); }},
      {"one number", {at::randn({})}, [&](auto& p) { return x * p[0]; }},
  };
  for (const auto& [name, values, model] : cases) {
    SCOPED_TRACE(name);
    expect_equal_gradients(values, model);
  }
}

TEST_F(TensorStorage, HalvesWorkAsWell) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = at::randn({5, 7}).to(type);
    expect_equal_gradients({at::randn({7, 7}).to(type), at::randn({7}).to(type)},
                           [&](auto& p) { return at::linear(x, p[0], p[1]); });
  }
}

TEST_F(TensorStorage, AnAccessToAReleasedParameterNamesIt) {
  const at::Tensor x = at::randn({5, 7});
  const at::Tensor ids = at::randint(0, 7, {3}, at::kLong);
  const at::Tensor image = at::randn({1, 7, 3, 3});
  BoundTensor bound("blocks.3.attn.qkv.weight", at::randn({7, 7}));
  at::Tensor& w = bound.tensor();
  const std::vector<std::pair<std::string, std::function<void()>>> accesses = {
      {"sum", [&] { std::ignore = w.sum(); }},
      {"linear", [&] { std::ignore = at::linear(x, w); }},
      {"mm", [&] { std::ignore = at::mm(x, w); }},
      {"clone", [&] { std::ignore = w.clone(); }},
      {"item", [&] { std::ignore = w[0][0].item<float>(); }},
      {"data_ptr", [&] { std::ignore = w.data_ptr(); }},
      {"a view's data_ptr", [&] { std::ignore = w.detach().view({-1}).const_data_ptr(); }},
      {"equal", [&] { std::ignore = at::equal(w, at::ones({7, 7})); }},
      {"zero_", [&] { w.detach().zero_(); }},
      {"copy_ into", [&] { w.detach().copy_(at::ones({7, 7})); }},
      {"copy_ from", [&] { at::empty({7, 7}).copy_(w.detach()); }},
      {"embedding", [&] { std::ignore = at::embedding(w, ids); }},
      {"layer_norm", [&] { std::ignore = at::layer_norm(x, {7}, w.select(0, 0), w.select(0, 1)); }},
      {"conv2d", [&] { std::ignore = at::conv2d(image, w.view({7, 7, 1, 1})); }},
      {"cat", [&] { std::ignore = at::cat({w, w}); }},
      {"a cast", [&] { std::ignore = w.to(at::kBFloat16); }},
      {"add", [&] { std::ignore = w + 1; }},
  };
  const auto expect_named = [&](const char* remedy) {
    for (const auto& [name, access] : accesses) {
      try {
        access();
        ADD_FAILURE() << name << " read a released parameter";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("'blocks.3.attn.qkv.weight' is released"),
                  std::string::npos)
            << name << ": " << error.what();
        EXPECT_NE(std::string(error.what()).find(remedy), std::string::npos) << name;
      }
    }
  };
  expect_named("add_external");
  bound.gather();
  EXPECT_TRUE(at::isfinite(w).all().item<bool>()) << "the error must go when the values come";
  bound.release();
  expect_named("add_external");
  bound.destroy();
  expect_named("its engine is gone");
}

TEST_F(TensorStorage, ShapesOfAReleasedParameterAreItsOwn) {
  BoundTensor bound("w", at::randn({7, 7}));
  EXPECT_EQ(bound.tensor().numel(), 49);
  EXPECT_EQ(bound.tensor().sizes(), at::IntArrayRef({7, 7}));
}

TEST_F(TensorStorage, TheTensorIsTheSameOneForLife) {
  at::Tensor tensor = at::randn({4, 5});
  const at::Tensor values = tensor.clone();
  // What a module holds: a handle of its own.
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const at::Tensor alias = tensor;
  const at::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const Layout layout(20, 2, DType::kFloat32);
  const auto full = bind_tensor(tensor, "w", layout);
  at::Tensor memory = at::zeros({layout.padded_numel()});
  memory.narrow(0, 0, 20).copy_(storage_elements(values));
  full->attach(memory.data_ptr());
  EXPECT_EQ(tensor.unsafeGetTensorImpl(), impl);
  EXPECT_EQ(alias.data_ptr(), memory.data_ptr());
  EXPECT_TRUE(at::equal(alias, values));
  const at::Tensor view = alias.t();
  at::Tensor elsewhere = memory.clone().mul_(2);
  full->detach();
  full->attach(elsewhere.data_ptr());
  EXPECT_TRUE(at::equal(view, values.t() * 2)) << "a view made after binding follows";
}

TEST_F(TensorStorage, StridesThatCoverTheStorageAreKept) {
  const at::Tensor base = at::randn({6, 4, 5});
  const std::vector<at::Tensor> dense = {
      at::randn({7, 3}).t(), base.permute({2, 0, 1}),
      at::randn({40}).slice(0, 7, 31).view({4, 6}).t(),
      at::randn({2, 3, 4, 4}).contiguous(at::MemoryFormat::ChannelsLast)};
  for (const at::Tensor& values : dense) {
    const at::Tensor expected = values.clone(at::MemoryFormat::Contiguous);
    BoundTensor bound("w", values);
    bound.gather();
    EXPECT_EQ(bound.tensor().strides(), values.strides());
    EXPECT_EQ(bound.tensor().storage_offset(), 0);
    EXPECT_TRUE(at::equal(bound.tensor(), expected));
  }
}

TEST_F(TensorStorage, StridesWithHolesOrOverlapBecomeContiguous) {
  const at::Tensor holes = at::randn({6, 8}).slice(1, 0, 5);
  const at::Tensor overlap = at::randn({1, 5}).expand({4, 5});
  for (const at::Tensor& values : {holes, overlap}) {
    const at::Tensor expected = values.clone();
    at::Tensor tensor = values.detach();
    const at::Tensor elements = storage_elements(tensor).clone();
    EXPECT_EQ(elements.numel(), values.numel());
    const Layout layout(values.numel(), 2, DType::kFloat32);
    const auto full = bind_tensor(tensor, "w", layout);
    at::Tensor memory = at::zeros({layout.padded_numel()});
    memory.narrow(0, 0, elements.numel()).copy_(elements);
    full->attach(memory.data_ptr());
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_TRUE(at::equal(tensor, expected));
    full->detach();
  }
}

TEST_F(TensorStorage, TheStorageHasRoomForThePaddingAndCannotBeResized) {
  BoundTensor bound("w", at::randn({5, 5}), 4);
  ASSERT_EQ(bound.layout().padded_numel(), 32);
  bound.gather();
  EXPECT_EQ(bound.tensor().storage().nbytes(), bound.layout().full_bytes());
  EXPECT_EQ(bound.tensor().numel(), 25);
  EXPECT_ANY_THROW(bound.tensor().detach().resize_({1000}));
}

TEST_F(TensorStorage, AParameterWithoutElementsIsAlwaysReadable) {
  BoundTensor bound("empty", at::randn({0, 4}));
  EXPECT_EQ(bound.tensor().sum().item<float>(), 0.0F);
  bound.full().attach(nullptr);
  EXPECT_EQ(bound.tensor().sum().item<float>(), 0.0F);
  EXPECT_EQ(at::linear(at::randn({3, 4}), bound.tensor()).sizes(), at::IntArrayRef({3, 0}));
  bound.full().detach();
  EXPECT_EQ(bound.tensor().sizes(), at::IntArrayRef({0, 4}));
}

TEST_F(TensorStorage, RefusesByNameWhatCannotBeSharded) {
  const Layout layout(4, 2, DType::kFloat32);
  const at::Tensor leaf = at::randn({4}).set_requires_grad(true);
  const std::vector<std::pair<std::string, at::Tensor>> refused = {
      {"undefined", at::Tensor()},
      {"layout", at::ones({4}).to_sparse()},
      {"meta", at::empty({4}, at::TensorOptions(at::kMeta))},
      {"grad_fn", leaf * 2},
      {"Double", at::ones({4}, at::kDouble)},
      {"Long", at::ones({4}, at::kLong)},
  };
  for (const auto& [reason, tensor] : refused) {
    try {
      std::ignore = bind_tensor(tensor, "blocks.0.bias", layout);
      ADD_FAILURE() << "expected ConfigError: " << reason;
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("'blocks.0.bias'"), std::string::npos);
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
  }
  EXPECT_THROW(std::ignore = bind_tensor(at::ones({5}), "w", layout), InternalError);
  EXPECT_THROW(std::ignore = bind_tensor(at::ones({4}, at::kHalf), "w", layout), InternalError);
}

TEST_F(TensorStorage, TypesHaveOneNameOnBothSides) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    EXPECT_EQ(dtype_of(at::empty({1}, scalar_type_of(dtype)), "w"), dtype);
  }
  for (const DType dtype : {DType::kFloat64, DType::kInt64, DType::kInt32, DType::kUInt8}) {
    EXPECT_EQ(at::empty({1}, scalar_type_of(dtype)).element_size(),
              static_cast<std::int64_t>(bytes_of(dtype)));
    EXPECT_THROW(dtype_of(at::empty({1}, scalar_type_of(dtype)), "w"), ConfigError);
  }
}

}  // namespace
}  // namespace tessera::shard
