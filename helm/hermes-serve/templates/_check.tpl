{{/* The container that runs before Ray in every Ray pod: it waits for Redis, or says in one sentence what is wrong.
     Without it, a wrong password or a closed way to DNS shows as a stack trace of Ray's GCS that names neither.
     (dict "root" $ "component" "head") */}}
{{- define "hermes.checkRedis" -}}
{{- $component := .component -}}
{{- with .root -}}
- name: check-redis
  image: {{ include "hermes.rayImage" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command:
    - hermes
    - check-redis
    - --namespace={{ .Values.settings.namespace }}
    - --service={{ include "hermes.service" . }}
    # Longer than a restart of Redis takes on another node. After it, Kubernetes shows the pod as failed, with the sentence.
    - --wait-s=120
    {{- if include "hermes.redisCa" . }}
    - --ca-file=/etc/hermes/redis/ca.crt
    {{- end }}
  terminationMessagePolicy: FallbackToLogsOnError # so that `kubectl describe pod` shows the sentence, too
  env:
    {{- include "hermes.redisUrl" . | nindent 4 }}
    {{- if and (eq $component "head") .Values.gcsFaultTolerance.enabled }}
    {{- include "hermes.gcsLogin" . | nindent 4 }}
    {{- end }}
    - name: NVIDIA_VISIBLE_DEVICES
      value: void
  # It ends before Ray starts, so the pod asks the node for no more because of it.
  {{- include "hermes.resources" (dict "root" . "cpus" 0.5 "memory" "256Mi") | nindent 2 }}
  {{- if include "hermes.redisCa" . }}
  volumeMounts:
    - name: redis-ca
      mountPath: /etc/hermes/redis
      readOnly: true
  {{- end }}
{{- end }}
{{- end }}
