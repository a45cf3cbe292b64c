"""The server's start options as plain data. Knows neither flags nor files: the command line fills it in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Literal, NamedTuple

from parley.dialects.dialect import Dialect
from parley.dialects.request_context import DEFAULT_API_OPTIONS, ApiOptions
from parley.disagg.wire.role import InstanceRoleName
from parley.engine.engine_process import EngineProcess
from parley.log_lines import LogFormat, LogLevel
from parley.settings.key_file import HashedKey
from parley.settings.media_hosts import MediaHost
from parley.types import EngineSettings, KeyOwner, MediaKind, Tenant
from parley.web.http_options import HttpOptions
from parley.web.tls.files import TlsFiles

EngineKind = Literal["process", "thread", "scripted", "vllm", "attached"]  # a scripted engine runs no model
# Limits of a request by kind, unless options say otherwise.
MEDIA_COUNTS: dict[MediaKind, int] = {"image": 16, "video": 2, "audio": 4}
MEDIA_SIZES: dict[MediaKind, int] = {"image": 20 << 20, "video": 256 << 20, "audio": 25 << 20}


class ListenAddress(NamedTuple):
    """A port for one API: the name of the API's prefix, host, port (0: any free one) and TLS."""

    api: str
    host: str
    port: int
    tls: TlsFiles | None = None


class OfferedModel(NamedTuple):
    """A model to serve: the names that clients may send as ``model``, its settings, and the kind of its engine, which
    determines the kind of the settings.

    Answers carry the first name. ``settings.model`` may be a folder, or a name that is looked up or downloaded.
    ``early_process``: its engine, of the kind "process", if it has been started already.
    """

    names: tuple[str, ...]
    settings: EngineSettings
    engine: EngineKind = "process"
    early_process: EngineProcess | None = None


SHARED_SEAL_SECRET = "a cluster without a secret"


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """Where images, videos and audio may come from, and how many and how large they may be. Sizes in bytes.

    * ``hosts``: items may be fetched from these over HTTP; none: nothing is fetched.
    * ``folder``: files below it may be read; none: no file is read.
    * ``counts``: the most items of a request, by kind.
    * ``request_size``: the most of all items of a request, as they come, encoded.
    * ``sizes``: the most of one item, by kind.
    * ``memory``: for items of a model that are being fetched, and as much again for processed items of its requests.
    * ``cache``: for items that are kept for later requests.
    * ``pixels``: the most that an image or a frame of a video may have.
    * ``workers``: processes that decode, for each model; ``eager``: start one with the server.
    * ``accepts_embeddings``: clients may send embeddings instead of media.
    """

    hosts: tuple[MediaHost, ...] = ()
    folder: str | None = None
    counts: Mapping[MediaKind, int] = field(default_factory=lambda: MEDIA_COUNTS)
    sizes: Mapping[MediaKind, int] = field(default_factory=lambda: MEDIA_SIZES)
    request_size: int = 512 << 20
    memory: int = 1 << 30
    cache: int = 256 << 20
    pixels: int = 50_000_000
    workers: int = 1
    eager: bool = False
    accepts_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class ServerOptions(HttpOptions):
    """All options of ``boot.server.run_server`` besides the models. Times in seconds, sizes in bytes.

    ``max_queue`` counts choices (prompts times n) that may wait for one model, in addition to the ``max_batch`` that
    run at once; if all of these slots are taken, a request gets 429.
    """

    tls: TlsFiles | None = None  # the certificate of all ports, except those of ``listen`` with their own
    root_path: str = ""  # the path prefix under which a proxy shows the server
    trusted_proxies: tuple[IPv4Network | IPv6Network, ...] = ()  # their headers name the client
    trusts_socket_proxies: bool = False  # trust proxies that connect over a Unix socket as well
    metrics_port: int | None = None  # serves only the metrics, and takes them from the other ports
    admin_port: int | None = None  # serves the routes that change the server, and takes them from the other ports
    admin_host: str = "127.0.0.1"
    port: int | None = 8000  # of all APIs. 0: any free port, printed at the start; None: only the ports of ``listen``
    listen: tuple[ListenAddress, ...] = ()  # further ports; entries with the same host and port share it
    apis: Mapping[str, Dialect] = field(default_factory=dict)  # replaces the default dialects of ``listen``, by name
    grpc: tuple[ListenAddress, ...] = ()  # ports for Triton's API over gRPC
    strict: bool = False  # the APIs on the shared port have the limits and refusals of the servers they copy
    tgi_compat: str = "3"  # the TGI version that the shared port copies
    endpoints: str | None = None  # the file that keeps the endpoints; None: they last until the server ends
    inference_tables: str | None = None  # the folder of the endpoints' inference tables; None: none are kept
    response_store: int = 64 << 20  # bytes of kept responses, conversations, completions and files; 0: none are kept
    response_store_file: str | None = None  # the database that keeps them; None: memory keeps them
    response_lifetime: float = 7 * 24 * 3600.0  # seconds that they are kept
    api_keys: tuple[str, ...] = ()  # without keys every client is admitted
    admin_keys: tuple[str, ...] = ()  # required for changes to the server, unless there are no keys at all
    priority_keys: tuple[str, ...] = ()  # API keys whose priorities count among the requests of all keys
    key_owners: Mapping[str, KeyOwner] = field(default_factory=dict)  # the owner of each key in ``api_keys``
    hashed_keys: tuple[HashedKey, ...] | None = None  # the keys of a key file in TOML; None: there is no such file
    key_files: tuple[Path, ...] = ()  # are read again when they change
    audit_log: str | None = None  # the file of calls that may change the server; None: none is kept
    usage_db: str | None = None  # the database of the usage of keys; None: usage is not counted
    share_prefixes: bool = False  # requests with different API keys share cached prefixes
    max_queue: int = 1024
    api_processes: int = 1  # processes that share the ports; with several, the main process only owns engines and state
    drain: float = 30.0  # how long running answers may continue after SIGTERM
    notes: tuple[str, ...] = ()  # warnings to log at the start

    max_prompt: int | None = None  # tokens, if less than the model's context
    max_output: int | None = None  # tokens; longer answers are cut
    timeout: float | None = None  # seconds for the whole request
    token_timeout: float | None = None  # seconds between two outputs of a request, or before the first

    lora_root: str | None = None  # clients may load adapters from inside this folder; None: they may not load any
    pull: bool = False  # clients may have models downloaded from the hub
    tokenizer_info: bool = False  # serve the tokenizer's configuration at /tokenizer_info
    ui: bool = True  # the shared port has the web page
    api_options: ApiOptions = DEFAULT_API_OPTIONS  # for OpenAI's and vLLM's APIs

    media: MediaOptions = MediaOptions()
    media_body_limit: int = 64 << 20  # bytes of a body if a model reads media; its text is limited by ``body_limit``

    # for an instance of a cluster
    role: InstanceRoleName = "mixed"
    peer_port: int | None = None  # takes requests from other instances; 0: any free port; None: no such port
    peer_port_attempts: int = 1  # number of ports from ``peer_port`` on that are tried
    peer_lease: float = 30.0  # seconds of silence until the other side of a handover is considered dead
    peer_checksum: bool = False  # compare checksums of pages that were handed over
    p_percentage: int = 50  # the share of a flex instance's time for prefill, in percent
    cluster_secret: str = ""  # all instances and coordinators of the cluster know it
    cluster_networks: tuple[IPv4Network | IPv6Network, ...] = ()  # hosts that are trusted without the secret
    peer_tls: TlsFiles | None = None  # encrypts handovers, with certificates on both sides

    otlp_traces_endpoint: str = ""  # the address that gets spans of requests; "": that of the environment variables
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"

    @property
    def seal_secret(self) -> str:
        """The secret of reasoning that clients send back; "" for a random one.

        A prefill and a decode instance read the same body and must get the same prompt, also without a cluster secret.
        """
        return self.cluster_secret or (SHARED_SEAL_SECRET if self.peer_port is not None else "")

    @property
    def has_private_prefixes(self) -> bool:
        """Whether requests of different tenants share no cached prefixes. A coordinator may know them where this
        server has no keys."""
        return not self.share_prefixes

    @property
    def has_keys(self) -> bool:
        """Whether clients need an API key."""
        return bool(self.api_keys) or self.hashed_keys is not None

    @property
    def key_sources(
        self,
    ) -> tuple[
        tuple[str, ...],
        tuple[str, ...],
        tuple[str, ...],
        str,
        Mapping[str, KeyOwner],
        tuple[HashedKey, ...] | None,
    ]:
        """The arguments of ``ApiKeys``."""
        secret, owners = self.cluster_secret, self.key_owners
        return self.api_keys, self.admin_keys, self.priority_keys, secret, owners, self.hashed_keys

    def prefix_owner(self, tenant: Tenant) -> str:
        """Return the id of the tenant that the cached prefixes of a request belong to; "" for all tenants."""
        return "" if self.share_prefixes else tenant.id
