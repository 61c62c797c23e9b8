"""The least that an endpoint like `POST /v1/grants` can do: one indexed query, one signature.

`python -m benchmarks.control.floor DATABASE_URL PORT`: FastAPI and SQLAlchemy as the service has
them, no authentication, no body, no middleware.
"""

from __future__ import annotations

import sys

import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import FastAPI
from sqlalchemy import select

from policy.signing import Signer
from service.db.session import open_database
from service.tenancy.models import Tenant
from strongroom.control import Typ


def floor(url: str) -> FastAPI:
    """The application."""
    database = open_database(url)
    signer = Signer(Ed25519PrivateKey.generate())
    app = FastAPI()

    @app.post("/floor/{tenant}")
    async def endpoint(tenant: str) -> dict[str, str]:
        async with database.readers() as session:
            found = await session.execute(
                select(Tenant.id, Tenant.revision).where(Tenant.id == tenant)
            )
            revision = found.one().revision
        return {"grant": signer.sign(Typ.GRANT, f'{{"revision":{revision}}}'.encode())}

    return app


if __name__ == "__main__":
    uvicorn.run(
        floor(sys.argv[1]), port=int(sys.argv[2]), log_level="warning", access_log=False, ws="none"
    )
