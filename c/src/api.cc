// The functions of ort_trainer_c_api.h: they check pointers, and turn exceptions into statuses.

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include <fcntl.h>
#include <sys/stat.h>
#ifdef __linux__
#include <sys/xattr.h>
#endif
#include <unistd.h>

#include "session.h"

struct OrtCheckpointState {
  ort_trainer::State state;
};
struct OrtTrainingSession {
  ort_trainer::Session session;
};

namespace ort_trainer {
namespace {

constexpr int kMostLinks = 40;  // as Linux
[[maybe_unused]] constexpr const char* kList = "system.posix_acl_access";

template <typename Function>
OrtStatus* Guarded(Function function) noexcept {
  try {
    function();
    return nullptr;
  } catch (const Error& error) {
    return ort->CreateStatus(error.code, error.what());
  } catch (const std::exception& error) {
    return ort->CreateStatus(ORT_FAIL, error.what());
  }
}

// Checks that no pointer is null.
template <typename... Pointers>
void Need(const Pointers*... pointers) {
  if (((pointers == nullptr) || ...)) Invalid("an argument is NULL");
}

// Checks that an array is not null, unless it is empty: a std::vector without elements has no memory.
template <typename T>
void NeedArray(const T* array, std::size_t size) {
  if (size != 0) Need(array);
}

Bytes ReadFile(const char* path, const std::string& what) {
  std::error_code none;  // a folder can be opened, too, and its size is 2^63 - 1
  if (!std::filesystem::is_regular_file(path, none)) {
    throw Error(ORT_NO_SUCHFILE, "there is no " + what + " '" + path + "'");
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  Bytes bytes(static_cast<std::size_t>(std::max<std::streamoff>(file.tellg(), 0)));
  file.seekg(0);
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("the " + what + " '" + path + "' can't be read");
  return bytes;
}

// The name of a file that a symbolic link leads to, which may not exist yet.
std::string RealPath(std::filesystem::path path) {
  for (int links = 0; std::filesystem::is_symlink(std::filesystem::symlink_status(path)); ++links) {
    if (links == kMostLinks) throw Error(ORT_FAIL, "'" + path.string() + "' is a symbolic link that leads back to itself");
    path = path.parent_path() / std::filesystem::read_symlink(path);
  }
  return path.string();
}

// Gives a file the access control list of another one, on Linux; returns whether it has none, or the file has it now.
bool KeepsList([[maybe_unused]] int file, [[maybe_unused]] const std::string& old) {
#ifdef __linux__
  std::array<char, 1 << 16> list;  // Linux's limit
  const ssize_t size = getxattr(old.c_str(), kList, list.data(), list.size());
  if (size >= 0) return fsetxattr(file, kList, list.data(), static_cast<std::size_t>(size), 0) == 0;
  fremovexattr(file, kList);  // of the folder's default
#endif
  return true;
}

// Gives a file the owner, the group and the mode of the one that it will replace. Where the system does not allow it,
// another group gets only what all users have.
bool KeepAccess(int file, const std::string& path, const struct stat& old) {
  mode_t mode = old.st_mode & 0777;
  struct stat own;
  if (fstat(file, &own) != 0) return false;
  if ((own.st_uid != old.st_uid || own.st_gid != old.st_gid) && fchown(file, old.st_uid, old.st_gid) != 0 &&
      fchown(file, static_cast<uid_t>(-1), old.st_gid) != 0) {
    const mode_t shared = mode & mode >> 3 & 07;
    mode = (mode & 0700) | shared << 3 | shared;
  }
  if (!KeepsList(file, path)) mode &= 0700;
  return fchmod(file, mode) == 0;
}

// Writes a file next to the target, which it then replaces; the target stays if that fails. A symbolic link and the mode
// of the target stay, too.
void WriteFile(const char* path, const Bytes& bytes) {
  const std::string target = RealPath(path);
  const std::string temporary = target + "." + std::to_string(std::random_device()()) + ".part";
  struct stat old;
  const bool replaces = stat(target.c_str(), &old) == 0;
  if (replaces && !S_ISREG(old.st_mode)) throw Error(ORT_FAIL, "'" + std::string(path) + "' can't be written: it is not a file");
  const int handle = open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL, replaces ? 0600 : 0666);
  std::FILE* file = handle < 0 ? nullptr : fdopen(handle, "wb");
  bool written = file != nullptr && std::fwrite(bytes.data(), 1, bytes.size(), file) == bytes.size() &&
                 std::fflush(file) == 0 && (!replaces || KeepAccess(handle, target, old)) && fsync(handle) == 0;
  int error = errno;
  if (file != nullptr && std::fclose(file) != 0 && written) written = false, error = errno;
  if (written && std::rename(temporary.c_str(), target.c_str()) == 0) return;
  if (written) error = errno;
  if (file != nullptr) std::remove(temporary.c_str());
  throw Error(ORT_FAIL, "'" + std::string(path) + "' can't be written: " + std::strerror(error));
}

void* Allocated(OrtAllocator* allocator, const void* data, std::size_t size) {
  void* memory = nullptr;
  Check(ort->AllocatorAlloc(allocator, size, &memory));
  std::memcpy(memory, data, size);
  return memory;
}

Step& StepOf(const OrtTrainingSession* session, bool training) {
  Need(session);
  return const_cast<OrtTrainingSession*>(session)->session.step(training);
}

template <bool training, bool inputs>
OrtStatus* Count(const OrtTrainingSession* session, size_t* out) noexcept {
  return Guarded([&] {
    Need(out);
    const Step& step = StepOf(session, training);
    *out = (inputs ? step.inputs() : step.outputs()).size();
  });
}

template <bool training, bool inputs>
OrtStatus* Name(const OrtTrainingSession* session, size_t index, OrtAllocator* allocator, char** out) noexcept {
  return Guarded([&] {
    Need(allocator, out);
    const Step& step = StepOf(session, training);
    const auto& names = inputs ? step.inputs() : step.outputs();
    if (index >= names.size()) Invalid("index " + std::to_string(index) + " is not below " + std::to_string(names.size()));
    *out = static_cast<char*>(Allocated(allocator, names[index].c_str(), names[index].size() + 1));
  });
}

template <bool training, typename SessionPointer>
OrtStatus* RunStep(SessionPointer session, const OrtRunOptions* options, size_t inputs_len, const OrtValue* const* inputs,
                   size_t outputs_len, OrtValue** outputs) noexcept {
  return Guarded([&] {
    NeedArray(inputs, inputs_len);
    NeedArray(outputs, outputs_len);
    Step& step = StepOf(session, training);
    if (outputs_len != step.outputs().size()) {
      Invalid("there are " + std::to_string(step.outputs().size()) + " outputs, but room for " +
              std::to_string(outputs_len) + " was given");
    }
    std::vector<OrtValue*> results(outputs, outputs + outputs_len);
    step.Run(options, {inputs, inputs + inputs_len}, results);
    std::copy(results.begin(), results.end(), outputs);
  });
}

OrtStatus* LoadCheckpoint(const ORTCHAR_T* path, OrtCheckpointState** out) noexcept {
  return Guarded([&] {
    Need(path, out);
    *out = new OrtCheckpointState{State(ReadFile(path, "checkpoint"), "checkpoint '" + std::string(path) + "'")};
  });
}

OrtStatus* LoadCheckpointFromBuffer(const void* buffer, const size_t size, OrtCheckpointState** out) noexcept {
  return Guarded([&] {
    Need(out);
    NeedArray(static_cast<const char*>(buffer), size);
    const auto* data = static_cast<const std::uint8_t*>(buffer);
    *out = new OrtCheckpointState{State(Bytes(data, data + size), "the checkpoint given as bytes")};
  });
}

OrtStatus* SaveCheckpoint(OrtCheckpointState* state, const ORTCHAR_T* path, const bool include) noexcept {
  return Guarded([&] {
    Need(state, path);
    WriteFile(path, state->state.ToFile(include));
  });
}

OrtStatus* CreateTrainingSession(const OrtEnv* env, const OrtSessionOptions* options, OrtCheckpointState* state,
                                 const ORTCHAR_T* training, const ORTCHAR_T* evaluation, const ORTCHAR_T* optimizer,
                                 OrtTrainingSession** out) noexcept {
  return Guarded([&] {
    Need(env, options, state, training, out);
    const auto read = [](const char* path, const char* what) {
      return path == nullptr ? std::optional<Bytes>() : ReadFile(path, what);
    };
    *out = new OrtTrainingSession{Session(state->state, env, options, ReadFile(training, "training model"),
                                          read(evaluation, "evaluation model"), read(optimizer, "optimizer model"))};
  });
}

OrtStatus* CreateTrainingSessionFromBuffer(const OrtEnv* env, const OrtSessionOptions* options, OrtCheckpointState* state,
                                           const void* training, size_t training_size, const void* evaluation,
                                           size_t evaluation_size, const void* optimizer, size_t optimizer_size,
                                           OrtTrainingSession** out) noexcept {
  return Guarded([&] {
    Need(env, options, state, out);
    NeedArray(static_cast<const char*>(training), training_size);
    const auto bytes = [](const void* data, size_t size) {
      const auto* begin = static_cast<const std::uint8_t*>(data);
      return data == nullptr || size == 0 ? std::optional<Bytes>() : Bytes(begin, begin + size);
    };
    *out = new OrtTrainingSession{Session(state->state, env, options, bytes(training, training_size).value_or(Bytes()),
                                          bytes(evaluation, evaluation_size), bytes(optimizer, optimizer_size))};
  });
}

// Functions of a session that only call one of its own.
template <typename Function>
OrtStatus* OnSession(OrtTrainingSession* session, Function function) noexcept {
  return Guarded([&] {
    Need(session);
    function(session->session);
  });
}

OrtStatus* LazyResetGrad(OrtTrainingSession* session) noexcept {
  return OnSession(session, [](Session& found) { found.LazyResetGrad(); });
}

OrtStatus* SetLearningRate(OrtTrainingSession* session, float rate) noexcept {
  return OnSession(session, [&](Session& found) { found.SetLearningRate(static_cast<double>(rate)); });
}

OrtStatus* GetLearningRate(OrtTrainingSession* session, float* out) noexcept {
  return OnSession(session, [&](Session& found) {
    Need(out);
    *out = static_cast<float>(found.LearningRate());
  });
}

OrtStatus* OptimizerStep(OrtTrainingSession* session, const OrtRunOptions* options) noexcept {
  return OnSession(session, [&](Session& found) { found.OptimizerStep(options); });
}

OrtStatus* RegisterLinearLRScheduler(OrtTrainingSession* session, const int64_t warmup, const int64_t total,
                                     const float initial) noexcept {
  return OnSession(session, [&](Session& found) {
    found.RegisterLinearScheduler(warmup, total, static_cast<double>(initial));
  });
}

OrtStatus* SchedulerStep(OrtTrainingSession* session) noexcept {
  return OnSession(session, [](Session& found) { found.SchedulerStep(); });
}

OrtStatus* GetParametersSize(OrtTrainingSession* session, size_t* out, bool trainable_only) noexcept {
  return OnSession(session, [&](Session& found) {
    Need(out);
    *out = found.ParametersSize(trainable_only);
  });
}

template <bool from_buffer>
OrtStatus* CopyParameters(OrtTrainingSession* session, OrtValue* buffer, bool trainable_only) noexcept {
  return OnSession(session, [&](Session& found) { found.CopyParameters(buffer, trainable_only, from_buffer); });
}

OrtStatus* ExportModelForInferencing(OrtTrainingSession* session, const ORTCHAR_T* path, size_t count,
                                     const char* const* names) noexcept {
  return OnSession(session, [&](Session& found) {
    Need(path);
    NeedArray(names, count);
    WriteFile(path, found.InferenceModel({names, names + count}));
  });
}

OrtStatus* SetSeedOfAll(const int64_t seed) noexcept {
  return Guarded([&] { SetSeed(seed); });
}

OrtStatus* AddProperty(OrtCheckpointState* state, const char* name, enum OrtPropertyType type, void* value) noexcept {
  return Guarded([&] {
    Need(state, name, static_cast<const char*>(value));
    Json property;
    if (type == OrtIntProperty) {
      property = *static_cast<const std::int64_t*>(value);
    } else if (type == OrtFloatProperty) {
      property = static_cast<double>(*static_cast<const float*>(value));
    } else if (type == OrtStringProperty) {
      property = static_cast<const char*>(value);
    } else {
      Invalid("the type of the property '" + std::string(name) + "' is none of OrtPropertyType");
    }
    for (const std::string& text : {std::string(name), property.text}) {
      if (ParseJson(ToText(text)).text != text) Invalid("a property is not valid UTF-8");
    }
    const std::lock_guard<std::mutex> lock(state->state.mutex);
    state->state.properties()[name] = property;
  });
}

OrtStatus* GetProperty(const OrtCheckpointState* state, const char* name, OrtAllocator* allocator,
                       enum OrtPropertyType* type, void** out) noexcept {
  return Guarded([&] {
    Need(state, name, allocator, type, out);
    auto& found = const_cast<OrtCheckpointState*>(state)->state;
    const std::lock_guard<std::mutex> lock(found.mutex);
    const Json* property = found.properties().find(name);
    if (property == nullptr) Invalid("unknown property '" + std::string(name) + "'");
    if (property->is(Json::Kind::kString)) {
      *type = OrtStringProperty;
      *out = Allocated(allocator, property->text.c_str(), property->text.size() + 1);
    } else if (property->is(Json::Kind::kInt)) {
      const std::int64_t value = property->integer();
      *type = OrtIntProperty;
      *out = Allocated(allocator, &value, sizeof(value));
    } else {
      const auto value = static_cast<float>(property->number());
      *type = OrtFloatProperty;
      *out = Allocated(allocator, &value, sizeof(value));
    }
  });
}

// Runs a function on a parameter, by its name.
template <typename Function>
OrtStatus* OnParameter(const OrtCheckpointState* state, const char* name, Function function) noexcept {
  return Guarded([&] {
    Need(state, name);
    State& found = const_cast<OrtCheckpointState*>(state)->state;
    const std::lock_guard<std::mutex> lock(found.mutex);
    function(found, found.parameter(name));
  });
}

OrtStatus* GetParameterTypeAndShape(const OrtCheckpointState* state, const char* name,
                                    OrtTensorTypeAndShapeInfo** out) noexcept {
  return OnParameter(state, name, [&](State&, Tensor& tensor) {
    Need(out);
    Check(ort->GetTensorTypeAndShape(tensor.value(), out));
  });
}

OrtStatus* UpdateParameter(OrtCheckpointState* state, const char* name, OrtValue* value) noexcept {
  return OnParameter(state, name, [&](State& found, Tensor&) { found.SetParameter(name, value); });
}

OrtStatus* GetParameter(const OrtCheckpointState* state, const char* name, OrtAllocator* allocator,
                        OrtValue** out) noexcept {
  return OnParameter(state, name, [&](State& found, Tensor& tensor) {
    Need(allocator, out);
    found.RequireValues();
    OrtValue* value = nullptr;
    const Shape& shape = tensor.shape();
    Check(ort->CreateTensorAsOrtValue(allocator, shape.data(), shape.size(), tensor.dtype().type, &value));
    Owned<OrtValue> owned(value);
    void* data = nullptr;
    Check(ort->GetTensorMutableData(value, &data));
    std::copy(tensor.bytes().begin(), tensor.bytes().end(), static_cast<std::uint8_t*>(data));
    *out = owned.release();
  });
}

constexpr OrtTrainingApi kApi = {
    LoadCheckpoint,
    SaveCheckpoint,
    CreateTrainingSession,
    CreateTrainingSessionFromBuffer,
    Count<true, false>,
    Count<false, false>,
    Name<true, false>,
    Name<false, false>,
    LazyResetGrad,
    RunStep<true, OrtTrainingSession*>,
    RunStep<false, const OrtTrainingSession*>,
    SetLearningRate,
    GetLearningRate,
    OptimizerStep,
    RegisterLinearLRScheduler,
    SchedulerStep,
    GetParametersSize,
    CopyParameters<false>,
    CopyParameters<true>,
    [](OrtTrainingSession* session) { delete session; },
    [](OrtCheckpointState* state) { delete state; },
    ExportModelForInferencing,
    SetSeedOfAll,
    Count<true, true>,
    Count<false, true>,
    Name<true, true>,
    Name<false, true>,
    AddProperty,
    GetProperty,
    LoadCheckpointFromBuffer,
    GetParameterTypeAndShape,
    UpdateParameter,
    GetParameter,
};

const OrtApiBase* stock_base = nullptr;
OrtApi* table = nullptr;

const OrtApi* TableOf(uint32_t version) noexcept { return stock_base->GetApi(version) ? table : nullptr; }
const OrtTrainingApi* TrainingApi(uint32_t) noexcept { return &kApi; }

}  // namespace
}  // namespace ort_trainer

const OrtTrainingApi* OrtTrainerGetApi(const OrtApi* api) {
  if (api == nullptr) return nullptr;
  ort_trainer::ort = api;
  return &ort_trainer::kApi;
}

const OrtApiBase* OrtTrainerGetApiBase(const OrtApiBase* base, uint32_t version, size_t size) {
  using namespace ort_trainer;
  static const OrtApiBase extended = [&] {
    const OrtApi* api = base->GetApi(version);
    if (api == nullptr) return *base;
    OrtTrainerGetApi(api);
    stock_base = base;
    // Never freed, as static objects may use it while the program ends. The program's headers may have more entries than
    // the library's.
    table = static_cast<OrtApi*>(std::memcpy(::operator new(size), api, size));
    table->GetTrainingApi = TrainingApi;
    return OrtApiBase{TableOf, base->GetVersionString};
  }();
  return &extended;
}
