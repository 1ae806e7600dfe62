"""The columns of a trajectory, with unit, shape and meaning of each; see trajectory.py for what is done with them."""

from typing import Literal

import pyarrow as pa

Stage = Literal["raw", "scored"]

SCHEMA_VERSION = "2"
FINISH_REASONS = ("stop", "length", "tool", "aborted", "error")
PER_TOKEN = ("response_ids", "action_mask", "behavior_logprobs", "policy_versions")


def column(name: str, type_: pa.DataType, *, unit: str, shape: str = "", doc: str) -> pa.Field:
    """A non-null field that carries its own unit, shape and meaning."""
    return pa.field(name, type_, nullable=False, metadata={"unit": unit, "shape": shape, "doc": doc})


RAW_COLUMNS = (
    column("ticket", pa.int64(), unit="ticket number", doc="the right under which this group was rolled out"),
    column("attempt", pa.int32(), unit="count from 0", doc="how often the ticket had been claimed before"),
    column("sample", pa.int32(), unit="count from 0", doc="index of the sample in its group"),
    column("prompt_id", pa.string(), unit="id", doc="<env>/<index>: names the prompt for ever"),
    column("env", pa.string(), unit="name", doc="the environment that made the prompt and judges the answer"),
    column("seed", pa.int64(), unit="seed", doc="seed of this sample's random stream"),
    column("prompt_ids", pa.list_(pa.int32()), unit="token id", shape="P", doc="prompt that is trained on"),
    column(
        "response_ids", pa.list_(pa.int32()), unit="token id", shape="T", doc="sampled and inserted tokens, in order"
    ),
    column("action_mask", pa.list_(pa.bool_()), unit="bool", shape="T", doc="true where the policy sampled the token"),
    column(
        "behavior_logprobs",
        pa.list_(pa.float32()),
        unit="nats",
        shape="T",
        doc="log-probability under the distribution sampled from; NaN where nothing was sampled",
    ),
    column(
        "policy_versions",
        pa.list_(pa.int32()),
        unit="commits",
        shape="T",
        doc="version of the weights that sampled the token; -1 where nothing was sampled",
    ),
    column(
        "used_versions",
        pa.list_(pa.int32()),
        unit="commits",
        shape="K",
        doc="distinct versions that sampled, ascending",
    ),
    column(
        "used_digests",
        pa.list_(pa.string()),
        unit="weight digest",
        shape="K",
        doc="digest the engine computed for each",
    ),
    column("finish_reason", pa.string(), unit="one of " + " ".join(FINISH_REASONS), doc="why the response ended"),
    column("error", pa.string(), unit="text", doc="what failed; empty unless finish_reason is error"),
    column("temperature", pa.float32(), unit="ratio", doc="divides the logits before sampling"),
    column("top_p", pa.float32(), unit="probability", doc="nucleus kept; 1 keeps all"),
    column("top_k", pa.int32(), unit="tokens", doc="most likely tokens kept; 0 keeps all"),
    column("max_new_tokens", pa.int32(), unit="tokens", doc="limit on the response"),
    column("engine", pa.string(), unit="name", doc="which engine sampled"),
    column("dtype", pa.string(), unit="numeric format", doc="format the engine computed in"),
    column("queued_at", pa.float64(), unit="s since epoch", doc="when the claim was made, by the writer's clock"),
    column("started_at", pa.float64(), unit="s since epoch", doc="when the first token was asked for"),
    column("finished_at", pa.float64(), unit="s since epoch", doc="when the last token arrived"),
    column(
        "guided_prompt_ids",
        pa.list_(pa.int32()),
        unit="token id",
        shape="P",
        doc="prompt as given to the engine when that held guidance which prompt_ids has not; empty otherwise",
    ),
    column(
        "branch_of",
        pa.int32(),
        unit="count from 0",
        doc="sample of the group whose response this one shares the beginning of; -1 for none",
    ),
    column(
        "branch_at",
        pa.int32(),
        unit="tokens",
        doc="leading response tokens that are those of branch_of; nothing was sampled for them here",
    ),
)

SINCE_VERSION_2: dict[str, object] = {"guided_prompt_ids": [], "branch_of": -1, "branch_at": 0}
"""Columns that batches of version 1 lack, and what they stood for there."""

SCORED_COLUMNS = (
    column("response_text", pa.string(), unit="text", doc="decoded for rewards and people; never encoded again"),
    column("reward", pa.float32(), unit="reward", doc="weighted sum of the components; NaN when there is an error"),
    column("reward_names", pa.list_(pa.string()), unit="name", shape="C", doc="names of the reward components"),
    column("reward_values", pa.list_(pa.float32()), unit="reward", shape="C", doc="value of each component"),
    column("verifier", pa.string(), unit="name@version", doc="what computed the reward"),
    column("reward_error", pa.string(), unit="text", doc="why there is no reward; empty when there is one"),
)

SCHEMAS: dict[Stage, pa.Schema] = {
    "raw": pa.schema(list(RAW_COLUMNS), metadata={"contract": "trajectory/raw", "version": SCHEMA_VERSION}),
    "scored": pa.schema(
        [*RAW_COLUMNS, *SCORED_COLUMNS], metadata={"contract": "trajectory/scored", "version": SCHEMA_VERSION}
    ),
}
