"""The demo's steps, in order. Each asserts what it promises; none is skipped in silence.

Safety steps come in pairs: the right party hits in the same run in which the wrong one misses,
so that a cache that is merely off does not pass.
"""

from __future__ import annotations

import array
import base64
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cli.demo import prompts
from cli.demo.engine import PAGE_TOKENS, Answer
from cli.demo.house import House
from cli.demo.processes import DemoFailure
from cli.demo.report import Report
from cli.demo.world import Grant, Part, Subject
from strongroom.blocks import pack_tokens

SPEEDUP_MIN: Final = 10.0
SERVED_WITHIN_S: Final = 30.0


class Scenario:
    """Runs the steps in a house whose processes are up."""

    def __init__(self, house: House, report: Report) -> None:
        self._house = house
        self._report = report
        self._world = house.world
        self._handbook = prompts.document()
        engine = house.engine
        self._system = engine.tokenize(prompts.SYSTEM)
        self._document = engine.tokenize(self._handbook)
        self._question = engine.tokenize(prompts.KEEPER.text)
        self._other_question = engine.tokenize(prompts.STONE.text)
        self._tokens = self._system + self._document + self._question
        self._system_end = len(self._system)
        self._document_end = self._system_end + len(self._document)
        self._shared_pages = _whole_pages(self._system_end)
        self._grants: list[Grant] = []

    def run(self) -> None:
        """Every step, in order."""
        self._people()
        self._cold_and_restored()
        self._strangers()
        self._forgers()
        self._shared_system_prompt()
        self._revoke_document()
        self._upgrade_model()
        self._remove_subject()
        self._audit()
        self._canaries()

    # Who is who

    def _people(self) -> None:
        world = self._world
        self._acme = self._house.acme
        self._clerks = world.group(self._acme, "clerks")
        self._alice = world.subject(self._acme, "alice", [self._clerks])
        self._carol = world.subject(self._acme, "carol", [self._clerks])
        self._eve = world.subject(self._acme, "eve")
        self._mallory = world.subject(self._house.globex, "mallory")
        self._version = world.document(
            self._acme, "town-handbook", self._clerks, _text_digest(self._handbook)
        )

    def _parts(self, end: int, document: str | None = None) -> list[Part]:
        """System prompt for everyone, then the document, then the subject's own question."""
        return [
            (self._system_end, {"group": "everyone"}),
            (self._document_end, {"document": document or self._version}),
            (end, {"group": "private"}),
        ]

    def _grant(
        self, subject: Subject, tokens: Sequence[int] | None = None, document: str | None = None
    ) -> Grant:
        tokens = self._tokens if tokens is None else tokens
        parts = self._parts(len(tokens), document)
        grant = self._world.grant(subject, self._house.artefacts, tokens, parts)
        self._grants.append(grant)
        return grant

    def _ask(self, grant: Grant, tokens: Sequence[int] | None = None) -> Answer:
        tokens = self._tokens if tokens is None else tokens
        return self._house.engine.complete(tokens, grant=grant.token, salt=grant.salt)

    def _until_served(self) -> None:
        """Wait until the engine and a restarted sidecar have found each other.

        A prompt of the shared system text alone tells: it is saved by the first request that is
        served, and hit by the next.
        """
        tokens = self._system + self._question
        parts: list[Part] = [(len(tokens), {"group": "everyone"})]
        deadline = time.monotonic() + SERVED_WITHIN_S
        while time.monotonic() < deadline:
            grant = self._world.grant(self._alice, self._house.artefacts, tokens, parts)
            if self._ask(grant, tokens).cached_tokens:
                return
            time.sleep(0.2)
        raise DemoFailure("the engine did not come back to the restarted sidecar")

    # Speed and exactness

    def _cold_and_restored(self) -> None:
        report, house = self._report, self._house
        count = len(self._tokens)
        restorable = _whole_pages(count - 1)
        report.figures |= {"prompt_tokens": count, "recomputed_suffix_tokens": count - restorable}
        grant = self._grant(self._alice)
        cold = self._ask(grant)
        report.step(
            "cold prefill computes everything and answers right",
            cold.cached_tokens == 0 and prompts.KEEPER.expected in cold.text,
            f"TTFT {cold.ttft_s:.3f} s, {count} tokens: {cold.text.strip()!r}",
        )
        saved = house.wait_saved(grant, restorable)
        report.step("the prompt's KV is saved, encrypted", saved >= restorable, f"{saved} tokens")

        house.restart_engine()
        host = self._restored("host", cold, restorable)

        house.restart_engine_and_sidecar()
        nvme = self._restored("nvme", cold, restorable)

        report.figures |= {
            "ttft_cold_s": round(cold.ttft_s, 4),
            "ttft_host_s": round(host.ttft_s, 4),
            "ttft_nvme_s": round(nvme.ttft_s, 4),
            "speedup_host": round(cold.ttft_s / host.ttft_s, 1),
            "speedup_nvme": round(cold.ttft_s / nvme.ttft_s, 1),
            "restored_tokens": min(host.cached_tokens, nvme.cached_tokens),
            "outputs_identical": cold.text == host.text == nvme.text,
            "answer": cold.text.strip(),
        }

    def _restored(self, tier: str, cold: Answer, tokens: int) -> Answer:
        grant = self._grant(self._alice)
        restored = self._ask(grant)
        ratio = cold.ttft_s / restored.ttft_s
        found = self._house.load_tier(grant)
        self._report.step(
            f"restored from {tier}: bit-exact",
            restored.cached_tokens == tokens and restored.text == cold.text and found == tier,
            f"{restored.cached_tokens} of {len(self._tokens)} tokens restored from {found}",
        )
        self._report.step(
            f"restored from {tier}: at least {SPEEDUP_MIN:.0f} times faster",
            ratio >= SPEEDUP_MIN,
            f"TTFT {restored.ttft_s:.3f} s against {cold.ttft_s:.3f} s ({ratio:.1f}x)",
        )
        return restored

    # Who may not hit

    def _strangers(self) -> None:
        """Another tenant, and a subject without the group: both miss, and look the same."""
        world, artefacts = self._world, self._house.artefacts
        foreign = self._house.globex_artefacts
        whole: list[Part] = [(len(self._tokens), {"document": self._version})]
        across = world.grant(self._mallory, foreign, self._tokens, whole)
        without = world.grant(self._eve, artefacts, self._tokens, whole)
        other_tenant, no_group = self._ask(across), self._ask(without)
        copyists = world.group(self._house.globex, "copyists")
        copyist = world.subject(self._house.globex, "colin", [copyists])
        own_copy = world.document(
            self._house.globex, "copy-of-handbook", copyists, _text_digest(self._handbook)
        )
        self._copyist, self._own_copy = copyist, own_copy
        copied = self._copyists_grant()
        copy_answer = self._ask(copied)
        cross = other_tenant.cached_tokens + copy_answer.cached_tokens
        self._report.figures["cross_tenant_hits"] = cross
        self._report.step(
            "the same prompt from another tenant misses",
            cross == 0 and across.granted_tokens == 0 and copied.granted_tokens > 0,
            f"{cross} cached tokens, also with the same text registered there",
        )
        same = (across.shape, other_tenant.shape, other_tenant.status) == (
            without.shape,
            no_group.shape,
            no_group.status,
        )
        self._report.step(
            "a subject without the group misses, and nothing tells the two apart",
            no_group.cached_tokens == 0 and without.granted_tokens == 0 and same,
            f"{no_group.cached_tokens} cached tokens; grant and answer have the same shape",
        )

    def _copyists_grant(self) -> Grant:
        """The other tenant's own, rightful grant for its own copy of the text."""
        parts = self._parts(len(self._tokens), self._own_copy)
        return self._world.grant(self._copyist, self._house.globex_artefacts, self._tokens, parts)

    def _forgers(self) -> None:
        """Forged spans, a replayed grant, a known salt: never a hit, in the engine either."""
        alice = self._grant(self._alice)
        control = self._ask(alice)
        everyone: list[Part] = [(len(self._tokens), {"group": "everyone"})]
        forged = self._world.grant(self._eve, self._house.artefacts, self._tokens, everyone)
        other_tokens = self._tokens[: self._document_end] + self._other_question
        engine = self._house.engine
        # Lying spans put the text into the room of `everyone`, where only the shared system
        # prompt is: what counts is what lies beyond that.
        lied = self._ask(forged).cached_tokens
        seen = {
            "spans that lie about the source": max(0, lied - self._shared_pages),
            "a grant whose payload was edited": engine.complete(
                self._tokens, grant=_edited(alice.token), salt=alice.salt
            ).cached_tokens,
            "another's grant with other tokens": engine.complete(
                other_tokens, grant=alice.token, salt=alice.salt
            ).cached_tokens,
            "a known salt without a grant": engine.complete(
                self._tokens, salt=alice.salt
            ).cached_tokens,
            "a grant with another salt": engine.complete(
                self._tokens, grant=alice.token, salt=forged.salt
            ).cached_tokens,
        }
        self._report.figures["ungranted_hits"] = sum(seen.values())
        for what, cached in seen.items():
            self._report.step(f"{what}: miss", cached == 0, f"{cached} cached tokens")
        self._report.step(
            "while the right party hits",
            control.cached_tokens > self._document_end - PAGE_TOKENS,
            f"{control.cached_tokens} cached tokens",
        )

    def _shared_system_prompt(self) -> None:
        without = self._grant(self._eve)
        eve = self._ask(without)
        tokens = self._tokens[: self._document_end] + self._other_question
        carol = self._ask(self._grant(self._carol, tokens), tokens)
        self._report.figures["shared_prefix_tokens"] = eve.cached_tokens
        self._report.step(
            "the shared system prompt is reused by a subject who may not read the document",
            0 < eve.cached_tokens == self._shared_pages,
            f"{eve.cached_tokens} tokens, the document's {len(self._document)} are computed",
        )
        self._report.step(
            "another member of the group reuses the document, with a question of her own",
            carol.cached_tokens == _whole_pages(self._document_end)
            and prompts.STONE.expected in carol.text,
            f"{carol.cached_tokens} tokens: {carol.text.strip()!r}",
        )

    # What revocation takes

    def _revoke_document(self) -> None:
        house, report = self._house, self._report
        old = self._grant(self._alice)
        before = self._ask(old).cached_tokens
        aside = house.copy_nvme_aside("before-document")
        self._until_served()
        certificate, path = house.revoke("document_version", self._version, "contract ended")
        fresh = self._ask(self._grant(self._alice))
        stale = self._ask(old)
        revoked_hits = max(0, fresh.cached_tokens - self._shared_pages) + stale.cached_tokens
        report.step(
            "document revoked: the next request recomputes",
            before > self._document_end - PAGE_TOKENS and revoked_hits == 0,
            f"{before} cached tokens before; after: {fresh.cached_tokens} with a new grant "
            f"(the shared system prompt), {stale.cached_tokens} with the old one",
        )
        house.put_nvme_back(aside, restart_engine=True)
        self._until_served()
        rightful = self._copyists_grant()
        control = self._ask(rightful).cached_tokens
        control_tier = house.load_tier(rightful)
        replayed = self._ask(old).cached_tokens
        again = self._world.document(
            self._acme, "town-handbook-again", self._clerks, _text_digest(self._handbook)
        )
        self._renewal = self._grant(self._alice, document=again)
        renewed = self._ask(self._renewal).cached_tokens
        opened = replayed + max(0, renewed - self._shared_pages)
        report.figures |= {"revoked_hits": revoked_hits, "replayed_ciphertext_opened": opened}
        report.step(
            "the old ciphertext, put back, does not open",
            opened == 0,
            f"{replayed} tokens with the old grant; {renewed} after the same text was "
            "registered again",
        )
        report.step(
            "while what was not revoked opens from the very same copy",
            control > self._document_end - PAGE_TOKENS and control_tier == "nvme",
            f"{control} tokens of the other tenant's own from {control_tier}",
        )
        verified, said = house.verify_offline(path)
        report.figures["certificate_verified"] = verified
        report.step("the certificate verifies offline", verified, said)
        forged, _ = house.verify_offline(_edited_file(path))
        report.step("an edited certificate does not", not forged, f"{certificate} edited")
        self._version = again

    def _upgrade_model(self) -> None:
        house = self._house
        old = self._grant(self._alice)
        self._report.require(
            house.wait_saved(self._renewal, PAGE_TOKENS) > 0, "the new version was not saved"
        )
        before = self._ask(old).cached_tokens
        aside = house.copy_nvme_aside("before-upgrade")
        self._until_served()
        house.upgrade_model("2")
        fresh = self._ask(self._grant(self._alice)).cached_tokens
        stale = self._ask(old).cached_tokens
        house.put_nvme_back(aside)
        self._until_served()
        replayed = self._ask(old).cached_tokens
        hits = fresh + stale + replayed
        self._report.figures["upgraded_model_hits"] = hits
        self._report.step(
            "model revision upgraded: miss, and neither an old grant nor old bytes bring it back",
            before > self._document_end - PAGE_TOKENS and hits == 0,
            f"{before} cached tokens before; {fresh} new grant, {stale} old grant, "
            f"{replayed} old grant and old bytes",
        )

    def _remove_subject(self) -> None:
        dave = self._world.subject(self._acme, "dave", [self._clerks])
        first = self._grant(dave)
        self._ask(first)
        before = self._ask(first).cached_tokens
        self._world.remove_subject(dave)
        after = self._ask(first).cached_tokens
        gone = not self._world.group_exists(self._acme, dave.private_group)
        retired = any(
            dave.private_group in entry["components"] and entry["subject"] == dave.name
            for entry in self._house.log_entries()
        )
        self._report.step(
            "a subject removed: their grants die, their private group's component is destroyed",
            before > 0 and after == 0 and gone and retired,
            f"{before} cached tokens before, {after} after; the log entry names the component",
        )

    # What is told afterwards

    def _audit(self) -> None:
        rows = self._house.who_accessed(self._version_revoked())
        subjects = sorted({row["subject"] for row in rows})
        self._report.figures["audit_rows"] = len(rows)
        self._report.step(
            'audit answers "who accessed document D"',
            "alice" in subjects and "carol" in subjects and "mallory" not in subjects,
            f"{len(rows)} rows: {', '.join(subjects)}",
        )

    def _canaries(self) -> None:
        """No file of the product holds the document, its token ids, a salt or a grant."""
        middle = self._document[100:116]
        needles = {
            "the document's text": self._handbook.splitlines()[5].encode()[:40],
            "the question": prompts.KEEPER.text.encode()[:24],
            "token ids (u32)": pack_tokens(middle),
            "token ids (i64)": array.array("q", middle).tobytes(),
            "token ids (text)": ", ".join(map(str, middle)).encode(),
        }
        for number, grant in enumerate(self._grants):
            needles[f"salt {number}"] = grant.salt.encode()
            needles[f"grant {number}"] = grant.token.rpartition(".")[2].encode()
        found = self._house.files_holding(needles)
        self._report.figures["canaries_found"] = len(found)
        self._report.step(
            "no file holds plaintext, token ids, a salt or a grant",
            not found,
            "; ".join(found[:3]) or f"{len(needles)} canaries searched for in every file written",
        )

    def _version_revoked(self) -> str:
        return self._house.revoked_version


def _whole_pages(tokens: int) -> int:
    return tokens - tokens % PAGE_TOKENS


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _edited(token: str) -> str:
    """The same JWS with one span's end moved, its signature kept."""
    header, payload, signature = token.split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    claims["sub"] = "eve"
    edited = base64.urlsafe_b64encode(json.dumps(claims).encode()).rstrip(b"=").decode()
    return f"{header}.{edited}.{signature}"


def _edited_file(path: Path) -> Path:
    """A copy of a certificate whose payload says another time."""
    copy = path.with_suffix(".edited")
    shutil.copyfile(path, copy)
    text = copy.read_text().strip()
    header, payload, signature = text.split(".")
    raw = bytearray(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    raw[len(raw) // 2] ^= 1
    edited = base64.urlsafe_b64encode(bytes(raw)).rstrip(b"=").decode()
    copy.write_text(f"{header}.{edited}.{signature}\n")
    return copy
