"""Objects in an S3 bucket, through obstore; the only file that imports it.

A create-only put is one PUT with `If-None-Match: *`, whatever the size, so an object appears whole or not
at all. Servers answer a lost one with 412, or 409 while the race is on: both mean ObjectExists here.

Requests are tried again here and not in obstore, which never repeats a put that timed out. That is safe:
a put that is repeated after its reply was lost finds its own object, and ObjectExists says no more than
that the key is taken (see `Store.put_or_get`).

Credentials, region and endpoint come from the AWS_* variables, else from the profile files (through boto3 where a
profile names a program, a role or a sign-on instead of keys), else from what obstore finds by itself (web identity,
container, instance). No message repeats any of them.
"""

import configparser
import importlib
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import obstore  # noqa: TID251 this is the one place
from obstore.exceptions import (  # noqa: TID251
    AlreadyExistsError,
    BaseError,
    GenericError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import S3Store  # noqa: TID251

from data_contracts.errors import ConfigError, ObjectExists, ObjectMissing, StoreError

T = TypeVar("T")

PART_BYTES = 16 * 2**20
"""Larger objects are read in parts, and written by a client that allows more time."""

LARGE_TIMEOUT_S = 900.0
MAX_PUT_BYTES = 5 * 2**30
"""What S3 takes in one PUT. Several parts would give up "whole or not at all" on some servers."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
CREDENTIALS_S = 10.0
"""How long a service that hands out credentials is asked: a machine that is no instance has none."""

NO_CREDENTIALS = "no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
CREDENTIAL_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


PROFILE_NAMES = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
    "region": "region",
}
DYNAMIC_NAMES = ("credential_process", "role_arn", "sso_session", "sso_start_url", "login_session")
"""Entries of a profile that say where its keys come from."""


class S3Objects:
    """The objects of one bucket."""

    pacing = (0.05, 1.0)
    parallel_reads = 16

    def __init__(self, bucket: str, *, retry_s: float, timeout_s: float) -> None:
        self._bucket = bucket
        self._retry_s = retry_s
        self._small = _open_client(bucket, timeout_s)
        self._large = _open_client(bucket, max(timeout_s, LARGE_TIMEOUT_S))

    def put_new(self, key: str, body: bytes) -> None:
        """Create `key`, durably and whole, or raise ObjectExists."""
        self._put(key, body, "create")

    def put(self, key: str, body: bytes) -> None:
        """Create or replace `key`."""
        self._put(key, body, "overwrite")

    def get(self, key: str) -> bytes:
        """Return all bytes of `key`, or raise ObjectMissing; large objects are read in parts at once."""

        def read() -> bytes | int:
            result = obstore.get(self._small, key)
            size = result.meta["size"]
            return bytes(result.bytes()) if size <= PART_BYTES else size

        whole = self._attempt("read", key, read)
        if isinstance(whole, bytes):
            return whole
        starts = range(0, whole, PART_BYTES)
        parts = self._part_readers.map(lambda start: self._get_part(key, start, min(start + PART_BYTES, whole)), starts)
        return b"".join(parts)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the bytes of every key, None for those that do not exist."""
        if len(keys) < 2:
            return [self._get_or_none(key) for key in keys]
        return list(self._object_readers.map(self._get_or_none, keys))

    def exists(self, key: str) -> bool:
        """Tell whether `key` exists."""
        try:
            self._attempt("looked at", key, lambda: obstore.head(self._small, key))
        except ObjectMissing:
            return False
        return True

    def list_folders(self, prefix: str) -> list[str]:
        """Return the names of the folders right below the folder `prefix`."""

        def read() -> list[str]:
            found = obstore.list_with_delimiter(self._small, prefix or None)
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in found["common_prefixes"]]

        return self._attempt("listed", prefix, read)

    def list(self, prefix: str) -> list[str]:
        """Return all keys below the folder `prefix`."""

        def read() -> list[str]:
            pages = obstore.list(self._small, prefix or None)
            return [entry["path"] for page in pages for entry in page]

        return self._attempt("listed", prefix, read)

    def delete(self, key: str) -> None:
        """Remove `key` if it exists."""
        try:
            self._attempt("deleted", key, lambda: obstore.delete(self._small, key))
        except ObjectMissing:
            return

    @cached_property
    def _object_readers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.parallel_reads, thread_name_prefix="s3-objects")

    @cached_property
    def _part_readers(self) -> ThreadPoolExecutor:
        # Apart from the readers of objects, who wait for parts: one pool for both could wait for itself.
        return ThreadPoolExecutor(8, thread_name_prefix="s3-parts")

    def _put(self, key: str, body: bytes, mode: Literal["create", "overwrite"]) -> None:
        if len(body) > MAX_PUT_BYTES:
            raise StoreError(
                f"s3://{self._bucket}/{key}: {len(body)} bytes are more than S3 takes at once"
                f" ({MAX_PUT_BYTES}); store it as several objects"
            )
        client = self._small if len(body) <= PART_BYTES else self._large

        def write() -> object:
            return obstore.put(client, key, body, mode=mode, use_multipart=False)

        self._attempt("written", key, write, creates=mode == "create")

    def _get_or_none(self, key: str) -> bytes | None:
        try:
            return self.get(key)
        except ObjectMissing:
            return None

    def _get_part(self, key: str, start: int, end: int) -> bytes:
        return self._attempt("read", key, lambda: bytes(obstore.get_range(self._small, key, start=start, end=end)))

    def _attempt(self, what: str, key: str, request: Callable[[], T], *, creates: bool = False) -> T:
        """Do a request until it succeeds, cannot succeed, or has been tried for `retry_s`.

        A conflict (409) means that somebody else has the key when the request `creates` it, and otherwise that the
        server is busy with it.
        """
        name = f"s3://{self._bucket}/{key}"
        started = time.monotonic()
        pause_s = FIRST_PAUSE_S
        tries = 0
        while True:
            tries += 1
            try:
                return request()
            except (BaseError, OSError) as cause:
                if creates and isinstance(cause, AlreadyExistsError):
                    raise ObjectExists(f"{name}: exists already") from None
                elapsed_s = time.monotonic() - started
                reply = _Reply(self._bucket, cause)
                if isinstance(cause, FileNotFoundError) and not reply.is_bucket_missing:
                    raise ObjectMissing(f"{name}: no such object") from None
                budget_s = min(self._retry_s, CREDENTIALS_S) if reply.is_about_credentials else self._retry_s
                if not reply.is_passing or elapsed_s + pause_s > budget_s:
                    # The cause is not chained: its text holds the whole reply, and some replies hold keys.
                    tried = f"tried {tries} times in {elapsed_s:.1f} s"
                    raise StoreError(f"{name}: could not be {what}: {reply.explain(tried)}") from None
            time.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class _Reply:
    """What an error of obstore says about the reply: its text is all there is."""

    def __init__(self, bucket: str, cause: Exception) -> None:
        text = str(cause)
        status = re.search(r"status code: (\d{3})([^:\n]*)", text)
        code = re.search(r"<Code>(\w+)</Code>", text)
        url = re.search(r"https?://\S+", text)
        self.status = int(status[1]) if status else None
        self.is_about_credentials = bool(url and not re.search(rf"/{re.escape(bucket)}(?:[./?]|$)", url[0]))
        """A request that does not name the bucket went to a service that hands out credentials."""
        self.is_bucket_missing = bool(code and code[1] == "NoSuchBucket")
        self.is_refusal = isinstance(cause, PermissionDeniedError | UnauthenticatedError)
        self.is_passing = isinstance(cause, GenericError | AlreadyExistsError | OSError) and (
            self.status is None or self.status >= 500 or self.status in (408, 409, 425, 429)
        )
        """Whether the same request may succeed later: throttling, server errors, and no reply at all."""
        self._summary = (
            f"{self.status}{status[2]}".strip() + (f" ({code[1]})" if code else "") if status else "no reply"
        )

    def explain(self, tried: str) -> str:
        """Say what failed and what to do, with the status and code of the reply and nothing else of it."""
        if self.is_bucket_missing:
            return "there is no such bucket; create it or name another"
        if self.is_about_credentials:
            return NO_CREDENTIALS
        if self.is_refusal:
            return f"{self._summary}; check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and what they allow"
        if self.is_passing:
            return f"{self._summary}, {tried}; check the server, AWS_ENDPOINT_URL and NO_PROXY, and start again"
        return f"{self._summary}; check AWS_REGION, AWS_ENDPOINT_URL and the bucket"


def _open_client(bucket: str, timeout_s: float) -> S3Store:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        if not re.fullmatch(r"[!-~]*", os.environ.get(name, "")):
            raise ConfigError(f"s3://{bucket}: {name} contains spaces, line ends or other unusual characters")
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = {"region": "us-east-1"}
    provider = None
    if not any(os.environ.get(name) for name in CREDENTIAL_VARIABLES):
        profile = _read_profile()
        options |= {PROFILE_NAMES[name]: value for name, value in profile.items() if name in PROFILE_NAMES}
        if "access_key_id" not in options and any(name in profile for name in DYNAMIC_NAMES):
            provider = _ask_boto3(bucket)
        elif "access_key_id" not in options and os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            raise ConfigError(f"s3://{bucket}: {NO_CREDENTIALS}")
    if region:
        options["region"] = region
    if endpoint:
        options["endpoint"] = endpoint
    allow_http = _is_loopback(endpoint) or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")
    if endpoint and not re.fullmatch(r"https?://[A-Za-z0-9.:\[\]_-]+(/[!-~]*)?", endpoint):
        raise ConfigError(f"s3://{bucket}: AWS_ENDPOINT_URL must look like https://host:port")
    if endpoint.startswith("http://") and not allow_http:
        raise ConfigError(
            f"s3://{bucket}: AWS_ENDPOINT_URL is plain http on another machine;"
            " use https, or set AWS_ALLOW_HTTP=true on a network you trust"
        )
    try:
        return S3Store(
            bucket,
            credential_provider=provider,
            config={"conditional_put": "etag", "disable_bulk_delete": "true", **options},  # pyright: ignore[reportArgumentType]
            client_options={
                "allow_http": allow_http,
                "timeout": timedelta(seconds=timeout_s),
                "connect_timeout": timedelta(seconds=min(5.0, timeout_s)),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=timeout_s)},
        )
    except (BaseError, ValueError) as cause:
        why = str(cause).partition("\n")[0]
        raise ConfigError(f"s3://{bucket}: the AWS_* variables do not make a client: {why}") from None


def _ask_boto3(bucket: str) -> Any:
    """Return what asks boto3 for the keys of the profile whenever they run out."""
    try:
        boto3 = importlib.import_module("boto3")
        return importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider(boto3.Session())
    except ImportError:
        raise ConfigError(
            f"s3://{bucket}: the profile gets its keys from a program, a role or a sign-on: pip install boto3"
        ) from None
    except Exception as cause:  # noqa: BLE001 botocore has dozens, and their texts may hold what the program printed
        raise ConfigError(f"s3://{bucket}: the profile gave no keys: {type(cause).__name__}") from None


def _read_profile() -> dict[str, str]:
    """Return what the files below ~/.aws say about the profile AWS_PROFILE ("default")."""
    profile = os.environ.get("AWS_PROFILE") or "default"
    folder = Path("~/.aws").expanduser()
    secrets_file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials"
    config_file = os.environ.get("AWS_CONFIG_FILE") or folder / "config"
    found: dict[str, str] = {}
    for file, section in ((config_file, f"profile {profile}"), (config_file, profile), (secrets_file, profile)):
        parser = configparser.RawConfigParser()
        parser.read(file)
        if parser.has_section(section):
            found |= dict(parser.items(section))
    return found


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
