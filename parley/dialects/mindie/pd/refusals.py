"""The texts of errors that MindIE documents for its coordinator."""

from __future__ import annotations

from parley.dialects.instance_plane import CoordinatorTexts

MINDIE_COORDINATOR_TEXTS = CoordinatorTexts(
    cluster_not_ready="MindIE-MS Coordinator is not ready",
    too_many_requests="Too many requests",
    memory_exceeded="Memory limit exceeded",
    duplicate_id="Duplicate request id",
    unknown_request="Invalid request",
    prefill_connect_failed="Connect to p instance failed",
    send_failed="Send message to instance failed",
    prefill_send_failed="Send messges to p instance failed",  # misspelled in the documentation
    prefill_receive_failed="Receive messages from p instance failed",
    prefill_failed="P instance error",
    decode_failed="D instance error",
    retry_failed="Request retry failed",
    schedule_timeout="Request schedule timeout",
    schedule_failed="Scheduler proc req failed",
    first_token_timeout="Request first token timeout",
    inference_timeout="Request inference timeout",
    tokenizer_timeout="Request tokenizer timeout",
    connection_limit="Connection request out of limit, max is {}",
)
