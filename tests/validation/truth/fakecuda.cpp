// What autograd asks of a device, answered for "cuda" by doing nothing: fake tensors of that device need it where
// PyTorch was built without CUDA. One device, one stream, events that are always there.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto CUDA = c10::DeviceType::CUDA;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return {CUDA, 0}; }
  c10::Device getDevice() const override { return {CUDA, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, {CUDA, 0}); }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
namespace at {
using ::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks);
}
