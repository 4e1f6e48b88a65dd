// What Python sees of the second device.
#include "collectives.h"
#include "device.h"
#include "nccl_like.h"
#include "pending.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

namespace second_device {

void set_on_kernel(py::object callback);  // kernels.cpp

namespace {

py::object* on_wait = nullptr;  // never freed: the interpreter may be gone before this library

}  // namespace

void tell(const std::string& what) {
  if (on_wait == nullptr) return;
  py::gil_scoped_acquire gil;
  if (!on_wait->is_none()) (*on_wait)(what);
}

// Backends are freed by threads without the interpreter's lock: they share one function that is never freed.
NcclLike::Connect connected_by(py::object connect) {
  auto* kept = new py::object(std::move(connect));
  return [kept](const NcclLike::StorePointer& store, int rank, int size) {
    py::gil_scoped_acquire gil;
    return (*kept)(store, rank, size).cast<BackendPointer>();
  };
}

}  // namespace second_device

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace second_device;
  register_hooks();
  on_wait = new py::object(py::none());
  m.attr("NUM_DEVICES") = kNumDevices;
  m.def("set_on_wait", [](py::object callback) { *on_wait = std::move(callback); });
  m.def("set_on_kernel", &set_on_kernel);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int index) { set_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("synchronize", [](int index) { wait_for_device("device.synchronize", static_cast<c10::DeviceIndex>(index)); });
  m.def("default_generator", [](int index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("at_once", &at_once);

  m.def("enable_sticky_errors", &enable_sticky_errors);
  m.def("raise_after_abort", &raise_after_abort);
  m.def("run_ahead_once_exists", &run_ahead_once_exists);
  m.def("num_wrong_kernels", &num_wrong_kernels);
  auto base = py::module_::import("torch.distributed").attr("_Backend");
  py::class_<NcclLikeOptions, c10::intrusive_ptr<NcclLikeOptions>>(m, "NcclLikeOptions", base.attr("Options"))
      .def("__deepcopy__", [](const NcclLikeOptions& self, py::dict) {
        return c10::make_intrusive<NcclLikeOptions>(self);
      });
  py::class_<NcclLike, c10::intrusive_ptr<NcclLike>>(m, "NcclLike", base)
      .def(py::init([](py::object connect, NcclLike::StorePointer store, int rank, int size,
                       std::chrono::milliseconds timeout) {
        static auto connected = connected_by(std::move(connect));
        return c10::make_intrusive<NcclLike>(connected, std::move(store), rank, size, timeout);
      }))
      .def_property_readonly("options", &NcclLike::getBackendOptions)
      .def("perform_nocolor_split", [](NcclLike& self, at::Device) {});
}
