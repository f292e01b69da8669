"""What engines share that ask a server for each response."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from megatron_kd.teacher.engines.base import RowRequest
from megatron_kd.teacher.engines.http_client import HttpOptions, TeacherClient, stream_answers
from megatron_kd.teacher.generators.base import Generator, Prompt, Response, Sampling, asked


class ServerGenerator(Generator):
    """Any number of equal servers, each response a request of its own."""

    Options = HttpOptions

    def __init__(
        self,
        model: str,
        sampling: Sampling,
        ends: Sequence[int],
        vocab_size: int,
        request: RowRequest | None,
        options: HttpOptions,
    ):
        self.model, self.sampling, self.ends = model, sampling, list(ends)
        self.request, self.options = request, options

    def stream(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, int, Response]]:
        wanted = asked(prompts, self.sampling)
        questions = [(prompts[i], j) for i, j in wanted]
        for place, response in stream_answers(self.options, questions, self._ask):
            yield *wanted[place], response

    def close(self) -> None:
        """Nothing is held between streams."""

    async def _ask(self, client: TeacherClient, question: tuple[Prompt, int]) -> Response:
        return await self.respond(client, *question)

    @abstractmethod
    async def respond(self, client: TeacherClient, prompt: Prompt, sample: int) -> Response:
        """Asks for one response."""
