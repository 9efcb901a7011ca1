// What a CPU build of torch lacks before it believes in one CUDA device: hooks that say it is there, and a guard that
// has nothing to switch. Its kernels are registered from Python; autocast's are in every build of torch.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct OneDeviceHooks final : at::CUDAHooksInterface {
  explicit OneDeviceHooks(at::CUDAHooksArgs /*unused*/) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex /*unused*/) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(at::DeviceIndex /*unused*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

struct OneDeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::Device only() const { return {kCuda, 0}; }
  c10::Stream stream() const { return c10::Stream(c10::Stream::DEFAULT, only()); }
  c10::DeviceType type() const override { return kCuda; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return only(); }
  c10::Device exchangeDevice(c10::Device /*unused*/) const override { return only(); }
  void setDevice(c10::Device /*unused*/) const override {}
  void uncheckedSetDevice(c10::Device /*unused*/) const noexcept override {}
  c10::Stream getStream(c10::Device /*unused*/) const override { return stream(); }
  c10::Stream getDefaultStream(c10::Device /*unused*/) const override { return stream(); }
  c10::Stream getNewStream(c10::Device /*unused*/, int /*unused*/) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream /*unused*/) const override { return stream(); }
  bool queryStream(const c10::Stream& /*unused*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*unused*/) const override {}
  void record(void** /*unused*/, const c10::Stream& /*unused*/, c10::DeviceIndex /*unused*/,
              c10::EventFlag /*unused*/) const override {}
  void block(void* /*unused*/, const c10::Stream& /*unused*/) const override {}
  bool queryEvent(void* /*unused*/) const override { return true; }
  void destroyEvent(void* /*unused*/, c10::DeviceIndex /*unused*/) const noexcept override {}
};

const auto registered = [] {
  static OneDeviceGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kCuda)].store(&guard);
  return true;
}();

}  // namespace

namespace at {
using CpuBackedHooks = OneDeviceHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CpuBackedHooks)
}  // namespace at
