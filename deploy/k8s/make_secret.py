"""Makes the secret of the cluster, once: a Job runs this, and pods that need the secret wait for it.

It asks the API server of Kubernetes with the account of its pod. A secret that exists already is left as it is.
"""

import json
import os
import secrets
import ssl
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path(os.environ.get("ACCOUNT_FOLDER", "/var/run/secrets/kubernetes.io/serviceaccount"))
NAME = "parley-cluster"
ALREADY_EXISTS = 409


def make_secret(api_server: str) -> str:
    """Create the secret in the namespace of this pod. Return what happened. Raises OSError."""
    namespace = (ACCOUNT / "namespace").read_text().strip()
    body = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME},
        "stringData": {"secret": secrets.token_hex(32)},
    }
    request = urllib.request.Request(
        f"{api_server}/api/v1/namespaces/{namespace}/secrets",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {(ACCOUNT / 'token').read_text().strip()}", "content-type": "application/json"},
    )
    authority = ACCOUNT / "ca.crt"
    context = ssl.create_default_context(cafile=str(authority)) if authority.exists() else None
    try:
        urllib.request.urlopen(request, timeout=30, context=context).close()
    except urllib.error.HTTPError as error:
        if error.code != ALREADY_EXISTS:
            raise
        return f"{NAME} exists already"
    return f"{NAME} is made"


if __name__ == "__main__":
    print(make_secret(os.environ.get("API_SERVER", "https://kubernetes.default.svc")))
