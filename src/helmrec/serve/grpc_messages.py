"""Messages of the Open Inference Protocol over gRPC, with Triton's calls for configuration, statistics and index.

The descriptors are made here, in a pool of their own: `grpcio` and `protobuf` are enough, and a process may also load
the generated modules of a client. Fields that HelmRec neither reads nor sets are left out; protobuf skips them.
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from helmrec.serve.statistics import InferenceStatistics

SERVICE = "inference.GRPCInferenceService"
_PACKAGE = "inference"
_FIELD = re.compile(r"(repeated |map |oneof |)(\w+) (\w+) = (\d+)")
_SCALARS = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("bool", "string", "bytes", "int32", "int64", "uint32", "uint64", "float", "double")
}
_WIDTHS = (8, 16, 32, 64)
_DATA_TYPES = (
    *("INVALID", "BOOL", *(f"UINT{bits}" for bits in _WIDTHS), *(f"INT{bits}" for bits in _WIDTHS)),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)
_MODEL = "string name = 1; string version = 2"
_TENSOR = "string name = 1; string datatype = 2; repeated int64 shape = 3; map InferParameter parameters = 4"
_MESSAGES = {  # `map X` has strings as keys; all fields of a message marked `oneof` exclude each other
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live = 1",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready = 1",
    "ModelReadyRequest": _MODEL,
    "ModelReadyResponse": "bool ready = 1",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name = 1; string version = 2; repeated string extensions = 3",
    "ModelMetadataRequest": _MODEL,
    "ModelMetadataResponse": "string name = 1; repeated string versions = 2; string platform = 3;"
    "repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5",
    "TensorMetadata": "string name = 1; string datatype = 2; repeated int64 shape = 3",
    "ModelInferRequest": "string model_name = 1; string model_version = 2; string id = 3;"
    "map InferParameter parameters = 4; repeated InferInputTensor inputs = 5;"
    "repeated InferRequestedOutputTensor outputs = 6; repeated bytes raw_input_contents = 7",
    "ModelInferResponse": "string model_name = 1; string model_version = 2; string id = 3;"
    "map InferParameter parameters = 4; repeated InferOutputTensor outputs = 5; repeated bytes raw_output_contents = 6",
    "InferInputTensor": f"{_TENSOR}; InferTensorContents contents = 5",
    "InferOutputTensor": f"{_TENSOR}; InferTensorContents contents = 5",
    "InferRequestedOutputTensor": "string name = 1; map InferParameter parameters = 2",
    "InferParameter": "oneof bool bool_param = 1; oneof int64 int64_param = 2; oneof string string_param = 3;"
    "oneof double double_param = 4; oneof uint64 uint64_param = 5",
    "InferTensorContents": "repeated bool bool_contents = 1; repeated int32 int_contents = 2;"
    "repeated int64 int64_contents = 3; repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5;"
    "repeated float fp32_contents = 6; repeated double fp64_contents = 7; repeated bytes bytes_contents = 8",
    "ModelConfigRequest": _MODEL,
    "ModelConfigResponse": "ModelConfig config = 1",
    "ModelConfig": "string name = 1; string platform = 2; string backend = 17; int32 max_batch_size = 4;"
    "repeated ModelInput input = 5; repeated ModelOutput output = 6; map ModelParameter parameters = 14",
    "ModelInput": "string name = 1; DataType data_type = 2; repeated int64 dims = 4; bool optional = 8",
    "ModelOutput": "string name = 1; DataType data_type = 2; repeated int64 dims = 3",
    "ModelParameter": "string string_value = 1",
    "ModelStatisticsRequest": _MODEL,
    "ModelStatisticsResponse": "repeated ModelStatistics model_stats = 1",
    "ModelStatistics": "string name = 1; string version = 2; uint64 last_inference = 3; uint64 inference_count = 4;"
    "uint64 execution_count = 5; InferStatistics inference_stats = 6; repeated InferBatchStatistics batch_stats = 7",
    "InferBatchStatistics": "uint64 batch_size = 1",
    "InferStatistics": ";".join(
        f"StatisticDuration {name} = {i}" for i, name in enumerate(InferenceStatistics.__struct_fields__, 1)
    ),
    "StatisticDuration": "uint64 count = 1; uint64 ns = 2",
    "RepositoryIndexRequest": "string repository_name = 1; bool ready = 2",
    "RepositoryIndexResponse": "repeated ModelIndex models = 1",
    "ModelIndex": "string name = 1; string version = 2; string state = 3; string reason = 4",
}


def _add_message(file: Any, name: str, fields: str) -> None:
    message = file.message_type.add(name=name)
    for kind, type_, field_name, number in _FIELD.findall(fields):
        field = message.field.add(name=field_name, number=int(number), label=3 if kind in {"repeated ", "map "} else 1)
        if kind == "oneof ":
            if not message.oneof_decl:
                message.oneof_decl.add(name="choice")
            field.oneof_index = 0
        if kind == "map ":
            entry_name = f"{field_name.title().replace('_', '')}Entry"
            entry = message.nested_type.add(name=entry_name, options={"map_entry": True})
            entry.field.add(name="key", number=1, label=1, type=_SCALARS["string"])
            entry.field.add(name="value", number=2, label=1, type=11, type_name=f".{_PACKAGE}.{type_}")
            field.type, field.type_name = 11, f".{_PACKAGE}.{name}.{entry_name}"
        elif type_ in _SCALARS:
            field.type = _SCALARS[type_]
        else:
            field.type, field.type_name = 14 if type_ == "DataType" else 11, f".{_PACKAGE}.{type_}"


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="helmrec/inference.proto", package=_PACKAGE, syntax="proto3")
    data_type = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        data_type.value.add(name=f"TYPE_{name}", number=number)
    for name, fields in _MESSAGES.items():
        _add_message(file, name, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


MESSAGES = _classes()  # class of each message, by name
