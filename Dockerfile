# syntax=docker/dockerfile:1

# jaxgpt on the CPU; --build-arg EXTRAS=cuda,hf,gguf,chat,serve,prepare is for Nvidia GPUs, and tpu in place of cuda for TPUs.
# docs/quickstart.md has the commands.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim

# Extras of pyproject.toml, separated by commas.
ARG EXTRAS=hf,gguf,chat,serve,prepare
RUN --mount=type=bind,target=/source \
    pip install --no-cache-dir --root-user-action ignore "/source[${EXTRAS}]" \
    && useradd --uid 1000 --home-dir /work --no-create-home jaxgpt \
    && install --directory --owner jaxgpt --group jaxgpt /work

COPY experiments /opt/jaxgpt/experiments

# Runs, corpora and compiled programs: a volume, so that they outlive the container. HOME is for users that the image
# does not know, as by --user "$(id -u)".
ENV HOME=/work
USER 1000
WORKDIR /work
VOLUME /work
EXPOSE 8000
ENTRYPOINT ["jaxgpt"]
CMD ["--help"]
